"""LightningModules that packages publish for time series, molecules and graphs."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.published import NUMBER, drawing
from tests.zoo.registry import of
from tests.zoo.steps import Published

LENGTH, AHEAD = 8, 4

# gluonts -------------------------------------------------------------------------------------------------------------


def with_inputs(module: Any, width: int = 3) -> Published:
    """Series of the inputs that a module of gluonts describes; `width` where it takes several at a time."""
    generator, columns = drawing(), {}
    for name, given in module.model.describe_inputs(NUMBER).data.items():
        shape = [width if size == -1 else size for size in given.shape]
        drawn = torch.ones(shape) if "observed" in name else torch.rand(shape, generator=generator) + 0.1
        columns[name] = drawn if given.dtype.is_floating_point else torch.zeros(shape, dtype=given.dtype)
    wide = [width] if columns["past_target"].ndim == 3 else []
    columns["future_target"] = torch.rand(NUMBER, AHEAD, *wide, generator=generator)
    columns["future_observed_values"] = torch.ones(NUMBER, AHEAD, *wide)
    return Published(module, [{name: column[index] for name, column in columns.items()} for index in range(NUMBER)])


ENCODER: dict[str, Any] = {
    "context_length": LENGTH, "prediction_length": AHEAD, "d_model": 16, "nhead": 2, "dim_feedforward": 32,
    "dropout": 0.0, "activation": "relu", "norm_first": True, "num_encoder_layers": 2, "scaling": "mean",
}  # fmt: skip


@of("gluonts")
def gluonts_deepar() -> Published:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    config = {
        "freq": "D", "context_length": LENGTH, "prediction_length": AHEAD, "num_feat_dynamic_real": 1,
        "num_feat_static_real": 1, "num_feat_static_cat": 1, "cardinality": [1], "num_layers": 2, "hidden_size": 8,
        "dropout_rate": 0.0, "lags_seq": [1, 2, 3],
    }  # fmt: skip
    return with_inputs(DeepARLightningModule(config))


@of("gluonts")
def gluonts_itransformer() -> Published:
    from gluonts.torch.model.i_transformer.lightning_module import ITransformerLightningModule

    return with_inputs(ITransformerLightningModule(ENCODER))


@of("gluonts")
def gluonts_lag_tst() -> Published:
    from gluonts.torch.model.lag_tst.lightning_module import LagTSTLightningModule

    return with_inputs(LagTSTLightningModule({**ENCODER, "freq": "D", "lags_seq": [1, 2, 3]}))


@of("gluonts")
def gluonts_patch_tst() -> Published:
    from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule

    own = {"patch_len": 4, "stride": 2, "padding_patch": "end", "num_feat_dynamic_real": 0}
    return with_inputs(PatchTSTLightningModule({**ENCODER, **own}))


# pytorch-forecasting -------------------------------------------------------------------------------------------------


def forecasting(name: str, options: dict[str, Any], **columns: Any) -> Published:
    """A model of pytorch-forecasting for 24 short series."""
    import numpy as np
    import pandas as pd
    import pytorch_forecasting

    draw = np.random.default_rng(0)
    rows = [
        {"series": str(series), "t": t, "value": np.sin(t / 3 + series) + draw.normal() / 10 + 2, "x": draw.normal()}
        for series in range(NUMBER)
        for t in range(LENGTH + AHEAD)
    ]
    data = pytorch_forecasting.TimeSeriesDataSet(
        pd.DataFrame(rows), time_idx="t", target="value", group_ids=["series"], min_encoder_length=LENGTH,
        max_encoder_length=LENGTH, min_prediction_length=AHEAD, max_prediction_length=AHEAD,
        time_varying_unknown_reals=["value"], **columns,
    )  # fmt: skip
    loader = data.to_dataloader(train=True, batch_size=NUMBER, shuffle=False, num_workers=0)
    module = getattr(pytorch_forecasting, name).from_dataset(data, log_interval=-1, **options)
    return Published(module, data, loader.collate_fn)


@of("pytorch-forecasting")
def forecasting_tft() -> Published:
    options = {"hidden_size": 8, "attention_head_size": 2, "dropout": 0.0, "hidden_continuous_size": 4}
    columns = {"static_categoricals": ["series"], "time_varying_known_reals": ["x", "t"]}
    return forecasting("TemporalFusionTransformer", options, **columns)


@of("pytorch-forecasting")
def forecasting_nbeats() -> Published:
    options = {"widths": [16, 16], "num_blocks": [1, 1], "num_block_layers": [2, 2], "dropout": 0.0}
    return forecasting("NBeats", {**options, "backcast_loss_ratio": 0.1})


@of("pytorch-forecasting")
def forecasting_deepar() -> Published:
    options = {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.0}
    return forecasting("DeepAR", options, time_varying_known_reals=["x"])


# Molecules and graphs ------------------------------------------------------------------------------------------------

MOLECULES = [
    "CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC", "CC(C)O", "c1ccncc1", "CCOC", "CCCl", "CC#N", "C1CCCCC1", "OCCO",
    "CNC", "CC=C", "CCS", "O=CO", "CCCO", "CCCN", "Cc1ccccc1", "CC(=O)N", "CCCCC", "CC(C)N", "c1ccsc1", "COC",
]  # fmt: skip


@of("chemprop")
def chemprop() -> Published:
    from chemprop import data, models
    from chemprop import nn as parts

    targets = torch.randn(NUMBER, 1, generator=drawing())
    points = [data.MoleculeDatapoint.from_smi(text, y=y.numpy()) for text, y in zip(MOLECULES, targets, strict=True)]
    predictor = parts.RegressionFFN(input_dim=32, hidden_dim=32)
    module = models.MPNN(parts.BondMessagePassing(d_h=32), parts.MeanAggregation(), predictor, batch_norm=False)
    return Published(module, data.MoleculeDataset(points), data.collate_batch)


class GraphRegression(L.LightningModule):
    """A number for each graph, by layers of graph attention."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATv2Conv

        self.layers = nn.ModuleList([GATv2Conv(16, 8, heads=2) for _ in range(4)])
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        values = batch.x
        for layer in self.layers:
            values = layer(values, batch.edge_index).relu()
        loss = F.mse_loss(self.head(global_mean_pool(values, batch.batch)).squeeze(-1), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss


@of("torch-geometric")
def geometric_attention() -> Published:
    from torch_geometric.data import Batch, Data

    generator = drawing()
    graphs = [
        Data(
            x=torch.randn(6, 16, generator=generator),
            edge_index=torch.randint(6, (2, 14), generator=generator),
            y=torch.randn(1, generator=generator),
        )
        for _ in range(NUMBER)
    ]
    return Published(GraphRegression(), graphs, Batch.from_data_list)
