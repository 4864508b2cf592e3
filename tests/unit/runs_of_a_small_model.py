"""The settings of the runs that tests of the training loop make, on the small model of `conftest.folder`."""

from logra.rl.config import RunConfig


def configured(folder, **changes):
    return RunConfig(**(dict(model=str(folder), updates=6, prompts=8, micro_batch=8, max_new_tokens=6, relative_step=1e-3, learning_rate=1e-3,
                             evaluate_every=3, evaluation_prompts=4, checkpoint_every=2, incorrect_reward=-0.5, selected_above=16, rank=16) | changes))
