"""What people read of optimizers' states in hooks, on one device."""

from __future__ import annotations

import io
from typing import Any

import torch

from tests.models.cases import optimizer_of
from tests.models.habits import Habit


class StateHabit(Habit):
    """Trains with AdamW, which keeps two moments."""

    def configure_optimizers(self) -> Any:
        return optimizer_of("adamw", self.parameters())


class MomentNorms(StateHabit):
    """The norm of each parameter's first moment."""

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        self.seen.append(sum(float(optimizer.state[p]["exp_avg"].norm()) for p in self.parameters()))


class AllStates(StateHabit):
    """All states there are, in a hook before the step, where there are none in the first one."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(sum(float(entries["exp_avg_sq"].sum()) for entries in optimizer.state.values()))


class SavingState(StateHabit):
    """On rank 0 only, as examples show it."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            file = io.BytesIO()
            torch.save(self.optimizers().optimizer.state_dict(), file)  # type: ignore[union-attr]
            self.seen.append(float(file.tell()))


class AskingForState(StateHabit):
    """As schedule-free optimizers ask before they average: without a state, a parameter is left alone."""

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.optimizers().optimizer.state  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in self.parameters():
                if "exp_avg" in state[parameter]:
                    parameter.add_(state[parameter]["exp_avg"], alpha=-0.01)


class SaferState(StateHabit):
    """The whole state, as a strategy gives it to rank 0."""

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.trainer.strategy.optimizer_state(self.optimizers())  # type: ignore[arg-type]
        if self.trainer.is_global_zero:
            self.seen.append(sum(float(entries["exp_avg"].norm()) for entries in state["state"].values()))


class KeepingInState(StateHabit):
    """Entries beside those of the optimizer, as SAM keeps weights there between its two steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_start(self, *args: Any) -> None:
        state = self.optimizers().optimizer.state  # type: ignore[union-attr]
        for parameter in self.parameters():
            state[parameter]["before"] = parameter.detach().clone()

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.optimizers().optimizer.state  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.lerp_(state[parameter]["before"], 0.1)
