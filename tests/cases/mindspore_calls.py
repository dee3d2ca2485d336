"""One-line calls in MindSpore's words, whose results real MindSpore and msrun.mindspore have in common.

`python tests/cases/mindspore_calls.py` prints as JSON what the `mindspore` of this Python computes of the calls in
tests/golden/mindspore_calls.json: with real MindSpore it makes that table.
"""

import json
import sys
from pathlib import Path

import numpy as np

STORED = Path(__file__).parents[1] / "golden" / "mindspore_calls.json"
CALLS = list(json.loads(STORED.read_text()))
"""The keys of the stored table; a call is added by a line `"CALL": null` in it."""

DIFFERENT = {
    "ops.FloatStatus()(x)": "MindSpore's CPU has no kernel of it",
    "ops.FloatStatus()(x / 0)": "MindSpore's CPU has no kernel of it",
    "nn.PSNR()(image / 16, image / 17)": "MindSpore 2.10 refuses its own default max_val here",
}
"""Call -> why the results differ. docs/how-to/from_mindspore.md has the reasons."""


def words(ms):
    """Return what the calls name."""
    from importlib import import_module

    for path in ("common.initializer", "amp", "dataset", "numpy", "mint", "ops.functional", "ops.operations"):
        import_module(f"{ms.__name__}.{path}")
    ops, nn, Tensor, Parameter = ms.ops, ms.nn, ms.Tensor, ms.Parameter  # noqa: N806
    x = Tensor(np.array([[1.25, -2.0, 3.5], [4.0, 0.5, -6.0]], np.float32))
    y = Tensor(np.array([[2.0, 2.5, 1.0], [1.5, 0.5, 4.0]], np.float32))
    graph = ops.MultitypeFuncGraph("graph")

    @graph.register("Number")
    def of_number(value):
        return value + 1

    @graph.register("Tensor")
    def of_tensor(value):
        return value + 2

    def network():
        return nn.Dense(3, 1, weight_init="ones", bias_init="zeros")

    def changed_by(operator, *args):
        tables = [Parameter(x, name="w"), Parameter(y, name="m"), Parameter(y, name="v")]
        operator(*tables, *(Tensor(one, ms.float32) if isinstance(one, float) else one for one in args))
        return tables

    def train_two_steps(optimizer, *args, **settings):
        net, loss = network(), nn.MSELoss()
        step = optimizer(net.trainable_params(), *args, **settings)
        gradients = ms.value_and_grad(lambda a, b: loss(net(a), b), None, net.trainable_params())
        losses = []
        for _ in range(2):
            value, found = gradients(x, y[:, :1])
            step(found)
            losses.append(value)
        return losses, net.weight

    def train_with_cell(scale):
        net = network()
        joined, step = nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.01)
        cell = (
            nn.TrainOneStepCell(joined, step)
            if scale is None
            else nn.TrainOneStepWithLossScaleCell(joined, step, scale)
        )
        results = [cell(x, y[:, :1]) for _ in range(2)]
        return results, net.weight

    return {
        "__name__": __name__,
        "ms": ms,
        "np": np,
        "ops": ops,
        "nn": nn,
        "msnp": ms.numpy,
        "mint": ms.mint,
        "Tensor": Tensor,
        "Parameter": Parameter,
        "x": x,
        "y": y,
        "cube": Tensor(np.arange(8, dtype=np.float32).reshape(2, 2, 2)),
        "ids": Tensor(np.array([1, 0], np.int32)),
        "places": Tensor(np.array([[0, 2], [1, 1]], np.int32)),
        "pairs": Tensor(np.array([[0, 1], [1, 2]], np.int32)),
        "vector": Tensor(np.array([10.0, 20.0], np.float32)),
        "vector3": Tensor(np.array([1.0, 2.0, 3.0], np.float32)),
        "hot": Tensor(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], np.float32)),
        "image": Tensor(np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)),
        "kernel": Tensor(np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2)),
        "boxes": Tensor(np.array([[1, 1, 8, 9], [3, 2, 9, 9], [12, 4, 18, 20]], np.float32)),
        "scored": Tensor(np.array([[1, 1, 8, 9, 0.4], [2, 1, 9, 9, 0.9], [12, 4, 18, 20, 0.5]], np.float32)),
        "changed_by": changed_by,
        "train_two_steps": train_two_steps,
        "train_with_cell": train_with_cell,
        "look_up_type": graph,
    }


def plain(value):
    """Return a result as JSON has it: a tensor as its shape, its type and its numbers."""
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    if isinstance(value, np.ndarray):
        return {
            "shape": list(value.shape),
            "type": value.dtype.name,
            "numbers": value.astype(np.float64).reshape(-1).tolist(),
        }
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def results(ms):
    """Return call -> its result, or the name of its error."""
    found = {}
    for call in CALLS:
        try:
            found[call] = plain(eval(call, words(ms)))
        except Exception as error:
            found[call] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(call, found[call], file=sys.stderr)
    return found


if __name__ == "__main__":
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    rows = results(mindspore)
    print(json.dumps(rows, indent=0))
