"""The small models that are shipped: where they lie, and what can be said of one without loading it."""

import json
import math

from safetensors import safe_open

from logra.rl.records import ROOT

BASE = ROOT / "data" / "learner"
BASES = {"learner": BASE, "mixture_learner": BASE.with_name("mixture_learner")}    # `RunConfig.model` -> what is shipped


def base_sha256(model: str) -> str | None:
    """The hash of a shipped base's weights, by its name in `RunConfig.model`; None for a model that is not shipped."""
    folder = BASES.get(model)
    return folder and json.loads((folder / "provenance.json").read_text())["files_sha256"]["model.safetensors"]


def parameters(model: str = "learner") -> int:
    """How many a shipped base has; a head that is its embedding counts once. Raises KeyError for a model that is not shipped."""
    with safe_open(BASES[model] / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
