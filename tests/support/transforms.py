"""Every public transform of optax and optax.contrib, by introspection."""

import functools
import inspect
import warnings

import jax.numpy as jnp
import optax
import optax.contrib
import pytest

row_by_row = pytest.mark.filterwarnings("ignore:kvjax. rows depend")
"""For tests of transforms whose norms are meant to be those of a row."""

ARGUMENTS = {
    "learning_rate": 0.05, "max_norm": 1.0, "max_delta": 0.1, "clipping": 0.1, "decay": 0.9, "step_size": 0.1,
    "weight_decay": 0.01, "every_k_schedule": 2, "memory_size": 2, "f_min": 0.0, "sync_period": 5, "seed": 0,
    "max_consecutive_errors": 3, "param_labels": "all", "mask": True, "freeze_mask": False, "measure_name": "norm",
    "step_size_fn": lambda count: 0.1, "schedule": lambda count: 0.1 / (1 + count), "measure": optax.tree.norm,
    "should_transform_fn": lambda step: step > 1, "measures": {"norm": optax.tree.norm},
    "inner_factory": optax.sgd, "transforms": {"all": optax.sgd(0.1)}, "f": lambda grads, params: grads,
    "axis": 0,
} | dict.fromkeys(("inner", "optimizer", "adv_optimizer", "base_optimizer", "fast_optimizer", "opt", "tx"),
                  optax.sgd(0.1, momentum=0.9))  # fmt: skip
# Their factories take transforms one after the other, or make something that makes a transform.
SPECIAL = {
    "chain": lambda: optax.chain(optax.sgd(0.1)),
    "named_chain": lambda: optax.named_chain(("sgd", optax.sgd(0.1))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(learning_rate=0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.01),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, 0),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
}
EXTRA = {"value": jnp.float32(1.0)}
"""What some of them want beside gradients."""


@functools.cache
def transforms():
    """By name; what is annotated as one and cannot be made by these arguments is an error."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in vars(module).items():
            if name.startswith("_") or not callable(make) or (inspect.isclass(make) and name not in SPECIAL):
                continue
            made = _made(name, make)
            if made is not None:
                found[name] = made
    return found


def _made(name, make):
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return None
    wanted = [p for p in signature.parameters.values() if p.default is inspect._empty and p.kind in (0, 1, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tx = SPECIAL[name]() if name in SPECIAL else make(**{p.name: ARGUMENTS.get(p.name, 0.1) for p in wanted})
        except Exception as error:
            assert "GradientTransformation" not in str(signature.return_annotation), (name, error)
            return None
    return tx if hasattr(tx, "init") and hasattr(tx, "update") else None
