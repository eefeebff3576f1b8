"""What people write into hooks to look at a module, copy it or save it, on one device."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.models.cases import next_token_loss, optimizer_of
from tests.models.user_code import Tokens


class Habit(Tokens):
    """Notes what a hook has seen: numbers that have to be those of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []


class GradientNormByHand(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm().item() for p in self.parameters() if p.grad is not None]
        self.seen.append(sum(norm**2 for norm in norms) ** 0.5)


class GradientNormAfterBackward(Habit):
    def on_after_backward(self) -> None:
        squares = [(p.grad**2).sum() for p in self.parameters() if p.grad is not None]
        self.seen.append(float(sum(map(float, squares)) ** 0.5))


class GradientNormStacked(Habit):
    """As `torch.nn.utils.clip_grad_norm_` does it, and logged."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm)
        self.seen.append(float(norm))


class ClippedByTorch(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)))


class GradientData(Habit):
    """Gradients that are given other memory, as by methods that add an average of earlier ones."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.data = p.grad.data * 0.5  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.data = p.grad.data + 0.1 * p.detach()  # type: ignore[union-attr]


class DecayingGradients(Habit):
    """Gradients that are made smaller where they would be set to zero; a hook before reads them."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class TakingApart(Habit):
    """Takes the tokens out of the batch and writes into them, as with labels of padding; adds what it has computed."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch.pop()
        tokens[tokens == 3] = 0
        batch.append(self.model(tokens))
        return next_token_loss(batch[0], tokens)


class ClippedByValue(Habit):
    """By torch's function, of gradients of which a strategy may split some."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("norm", norm)
        self.seen.append(float(norm))


class LightningNorms(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen.append(float(norms["grad_2.0_norm_total"]))


class WeightMeans(Habit):
    """Means of weights, from formatted numbers, numpy and lists."""

    def on_train_batch_end(self, *args: Any) -> None:
        for block in (self.model.blocks[0], self.model.blocks[2]):
            weight = block.mlp[0].weight.detach()
            self.seen.append(float(weight.mean()))
            self.seen.append(float(f"{weight.abs().max():.6f}"))
            self.seen.append(float(weight.cpu().numpy().sum()))
            self.seen.append(sum(weight.flatten().tolist()))
            self.log("mean", weight.mean())


class Keeping(Habit):
    """What hooks keep is read when training has ended."""

    def on_after_backward(self) -> None:
        weight = self.model.blocks[2].mlp[0].weight
        self.kept = [weight.grad.norm(), weight.grad.clone(), weight.detach().clone()]  # type: ignore[union-attr]


class Histograms(Habit):
    """As loggers make them: on rank 0 only, whatever they are given."""

    def on_train_batch_end(self, *args: Any) -> None:
        experiment = self.logger.experiment  # type: ignore[union-attr]
        for name, parameter in self.named_parameters():
            experiment.add_histogram(name, parameter, self.global_step)


class Saving(Habit):
    """On rank 0 only, as examples show it."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            file = io.BytesIO()
            torch.save(self.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            self.seen.append(float(sum(value.double().sum() for value in loaded.values())))


class Copying(Habit):
    def on_train_batch_end(self, *args: Any) -> None:
        copied = copy.deepcopy(self.model)
        self.seen.append(float(sum(p.detach().double().sum() for p in copied.parameters())))


class GoingBack(Habit):
    """Copies of all values, of those of a part, and of an optimizer's state, to which it goes back later."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.best = copy.deepcopy(self.state_dict())
            self.part = copy.deepcopy(self.model.blocks[0].state_dict())
        if batch_idx == 2:
            now = self.state_dict()
            self.load_state_dict({name: 0.25 * value + 0.75 * now[name] for name, value in self.best.items()})
            self.model.blocks[0].load_state_dict(self.part)


class Masking(Habit):
    """Only some rows of a table train: the mask is a plain tensor."""

    def on_after_backward(self) -> None:
        weight = self.model.tokens.weight
        weight.grad.mul_((torch.arange(len(weight)) % 3 == 0).float()[:, None].expand(weight.shape).clone())


class MoreBehindBackward(Habit):
    """Noise on gradients, in a backward of its own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.grad.add_(1e-3 * torch.randn(parameter.shape, generator=generator))  # type: ignore[union-attr]


class CopyingAtStart(Habit):
    """A teacher that is made when training starts."""

    def on_train_start(self) -> None:
        self.teacher = [copy.deepcopy(self.model).eval().requires_grad_(False)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            target = self.teacher[0](batch[0])
        return loss + target.pow(2).mean()


class Transposed(Habit):
    """An operation that gives a parameter another shape, which it cannot have where it is cut."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.blocks[0].mlp[0].weight.data.t_()


class Unique(Habit):
    """An operation that torch cannot compute on shards."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(torch.unique(self.model.blocks[0].mlp[0].weight.detach()).numel()))


class AssigningData(Habit):
    """Whole values in place of a parameter's own."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            for block in self.model.blocks:
                weight = block.mlp[0].weight
                weight.data = torch.linspace(-0.2, 0.2, weight.numel()).reshape(weight.shape)


class LoadingIntoPart(Habit):
    """Pretrained weights of a submodule, loaded when `fit` begins."""

    def on_fit_start(self) -> None:
        weights = {
            name: torch.full(value.shape, 0.01 * number)
            for number, (name, value) in enumerate(self.model.blocks[2].mlp.state_dict().items())
        }
        self.model.blocks[2].mlp.load_state_dict(weights)


class Sampling(Habit):
    def on_train_epoch_end(self) -> None:
        tokens = torch.zeros(1, 2, dtype=torch.long)
        with torch.no_grad():
            for _ in range(5):
                tokens = torch.cat([tokens, self.model(tokens)[:, -1:].argmax(-1)], 1)
        self.seen.append(float(tokens.double().sum()))


class GradientHooks(Habit):
    """Hooks on tensors, as `wandb.watch` registers them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: self.seen.append(float(grad.norm())))


class GradientHooksAtStart(Habit):
    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: self.seen.append(float(grad.norm())))


class AverageByTorch(Habit):
    """An average that is a submodule, with a stack of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def configure_optimizers(self) -> Any:
        return optimizer_of("sgd", self.model.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.model)


class AverageByHand(Habit):
    """An average of the weights that the hooks keep, swapped in for a look."""

    def on_train_start(self) -> None:
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.5)

    @torch.no_grad()
    def on_train_end(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.average[name])


class Barrier(Habit):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


class Broadcast(Habit):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        factor = self.trainer.strategy.broadcast(2.0)
        return super().training_step(batch, batch_idx) * factor


class Graph(Habit):
    """A module that a logger can run, to log its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 16, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class TwoNames(Habit):
    """One stack under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model.blocks


class Versioned(nn.Module):
    """A layer that reads files of its earlier version otherwise, as layers of torch do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class WithVersion(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.versioned = Versioned()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.versioned.scale.pow(2).mean()
