"""KL control in a loop that is not yours: one that calls the model, backward and `optimizer.step()`, and has no place for α.

    sketches  = logra.attach(model, rank=64)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    steps     = logra.StepControl(model, optimizer, logra.KLControl(logra.ConstantBudget(1e-3)))

From there on every `optimizer.step()` without an α is scaled to the budget (Eq. 7) on what the model was trained on since the last one, and
the control's state is saved and loaded with the optimizer's. It is done with PyTorch's own hooks, and so works under transformers'
Trainer, TRL and accelerate as well (see `logra.integrations`).
"""

import torch
from torch.nn import functional as F

from logra.kl import Contexts, KLControl

IGNORED = -100                                              # of labels, as in torch's cross_entropy


class StepControl:
    """Watches a model's training forwards and scales its optimizer's steps.

    model: the one that `attach` was called on, not what wraps it; called with `input_ids` and, where there is padding, `attention_mask`. With
    `labels` the tokens that are not ignored are the predictions; without, all of them. Sequences packed into one row are not told apart.
    responses: how many rows are probed, the first ones since the last step. `last`: alpha, predicted_kl and budget of the latest step.
    """

    def __init__(self, model, optimizer, control: KLControl, responses: int = 8):
        self.model, self.control, self.responses = model, control, responses
        self.last: dict[str, float] = {}
        self._rows: list[Contexts] = []
        self._handles = [model.register_forward_pre_hook(self._see, with_kwargs=True), optimizer.register_step_pre_hook(self._scale),
                         optimizer.register_state_dict_post_hook(lambda _, state: state | {"control": control.state_dict()}),
                         optimizer.register_load_state_dict_pre_hook(self._load)]

    def remove(self) -> None:
        """Leave model and optimizer as they were."""
        for handle in self._handles:
            handle.remove()

    def _see(self, module, args, inputs) -> None:
        held = sum(len(rows.input_ids) for rows in self._rows)
        if held < self.responses and module.training and torch.is_grad_enabled():
            ids = inputs["input_ids"] if "input_ids" in inputs else args[0]
            rows = right_padded(ids, inputs.get("attention_mask"), inputs.get("labels"))
            self._rows.append(Contexts(*(x[:self.responses - held] for x in (rows.input_ids, rows.attention_mask, rows.predictions))))

    def _scale(self, optimizer, args, given):
        """α in the place of none. A closure is called here, for its backward."""
        alpha = args[1] if len(args) > 1 else given.get("alpha")
        if callable(alpha):
            with torch.enable_grad():
                alpha()
        elif alpha is not None:
            return None
        if not self._rows:
            raise RuntimeError("no training forward of the model since the last step: StepControl is given the model that `attach` was, and it is "
                               "called in train mode")
        contexts, self._rows = joined(self._rows), []
        alpha = self.control.scale(self.model, optimizer.propose(), contexts)
        self.last = {"alpha": alpha, "predicted_kl": alpha ** 2 * self.control.q, "budget": self.control.budget_now}
        return (optimizer, alpha), {}

    def _load(self, _, state: dict) -> None:
        if "control" in state:
            self.control.load_state_dict(state["control"])


def right_padded(input_ids, attention_mask=None, labels=None) -> Contexts:
    """Contexts of rows that may be padded anywhere, [b, t]: each row's tokens moved together to the left. labels: as the model takes them, not shifted."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    order = mask.bool().byte().argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    predicted = mask.bool() if labels is None else mask.bool() & (labels.gather(1, order) != IGNORED)
    return Contexts.of_responses(input_ids.gather(1, order), mask, predicted)


def joined(parts: list[Contexts]) -> Contexts:
    """All rows, as wide as the longest of them."""
    width = max(int(part.attention_mask.sum(1).max()) for part in parts)

    def stacked(rows):
        return torch.cat([F.pad(row, (0, max(0, width - row.shape[1])))[:, :width] for row in rows])

    return Contexts(*(stacked([getattr(part, field) for part in parts]) for field in ("input_ids", "attention_mask", "predictions")))
