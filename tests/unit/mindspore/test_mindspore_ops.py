"""Operators, tensors and settings in MindSpore's words."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import msrun.mindspore as ms
from msrun import contract
from msrun.errors import StrategyError, UsageError
from msrun.mindspore import context, import_paths, nn, ops
from msrun.mindspore.__main__ import main as run_script
from msrun.mindspore.ops import table
from msrun.mindspore.tensor import Printed, as_results
from msrun.runtime.parallel.border import LateLoss
from msrun.runtime.sharding.named_layout import gathered_layouts

X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
Y = torch.tensor([[2.0, 2.0, 2.0], [1.0, 0.5, 4.0]])


@pytest.mark.parametrize(
    ("operator", "inputs", "expected"),
    [
        (ops.TensorAdd(), (X, Y), X + Y),
        (ops.Minimum(), (X, Y), torch.minimum(X, Y)),
        (ops.Softmax(0), (X,), X.softmax(0)),
        (ops.MatMul(transpose_a=True), (X, Y), X.T @ Y),
        (ops.BatchMatMul(transpose_b=True), (X[None], Y[None]), X[None] @ Y.T[None]),
        (ops.Squeeze(), (X[None, :, None],), X),
        (ops.Depend(), (X, Y), X),
        (ops.OneHot(0), (torch.tensor([1]), 2, 1.0, 0.0), torch.tensor([[0.0], [1.0]])),
        (ops.AllReduce("sum"), (X,), X),
        (ops.AllGather(), (X,), X),
        (ops.ReduceScatter(), (X,), X),
    ],
)
def test_operator_that_no_stored_call_has_computes_what_mindspores_documents_say(operator, inputs, expected):
    torch.testing.assert_close(operator(*inputs), expected, rtol=0, atol=0)


def test_shapes_and_scalars():
    assert ops.Shape()(X) == ops.shape(X) == (2, 3)
    assert torch.equal(ops.scalar_to_array(-1.0), torch.tensor(-1.0))
    (copy,) = ops.Broadcast(0)((X,))
    assert torch.equal(copy, X)


def test_operator_with_a_strategy_computes_the_same_and_a_wrong_one_is_refused():
    matmul = ops.MatMul().shard(((1, 1), (1, 2)))
    assert torch.equal(matmul(X, Y.T), X @ Y.T)
    with pytest.raises(StrategyError, match="strategy"):
        ops.MatMul().shard(((0, 1), (1, 2)))
    with pytest.raises(UsageError, match="communication written by hand has no strategy"):
        ops.AllReduce().shard(((1, 1),))


def test_products_of_two_and_three_dimensions_need_layouts_that_share_an_axis():
    layout = ms.parallel.Layout((2, 2), ("x", "y"))
    for strategy in (((1, 4), (2, 2)), (layout("None", "y"),), (layout("None", "y"), layout)):
        with pytest.raises(UsageError, match="MatMul with enable_nd_tp: give shard two Layouts, called with names"):
            ops.MatMul().add_prim_attr("enable_nd_tp", value=True).shard(strategy)
    with pytest.raises(UsageError, match="no axis cuts the dimension that both inputs have"):
        ops.BatchMatMul().add_prim_attr("enable_nd_tp", value=True).shard((layout("None", "y"), layout("x", "None")))
    cube = ms.parallel.Layout((2, 2, 2), ("x", "y", "z"))
    for given, result in (
        ((cube("z", ("x", "y")), cube("x", "y")), cube("z", ("y", "x"))),
        ((cube(("z", "y"), "x"), cube(("x", "z"), "y")), cube(("z", "x"), "y")),
    ):
        assert gathered_layouts("MatMul", given, (False, False)) == ((cube("z", "x"), cube("x", "y")), (result,))
        turned = gathered_layouts("MatMul", [cube(*one.tensor_map[::-1]) for one in given], (True, True))
        assert turned == ((cube("x", "z"), cube("y", "x")), (result,))


def test_cells_are_placed_on_ranks_that_there_are():
    for place in (("MS_SCHED", 0), ("MS_WORKER", 1), ("MS_WORKER", -1), ("MS_WORKER", "0")):
        with pytest.raises(UsageError, match=r'"MS_WORKER" and a rank from 0 to 0'):
            nn.Dense(2, 2).place(*place)
    cell = nn.Dense(2, 3)
    cell.place("MS_WORKER", 0)
    assert cell(torch.ones(1, 2)).shape == (1, 3)


def test_tensors_and_parameters_are_torchs():
    data = np.array([1.0, 2.0], np.float32)
    tensor = ms.Tensor(data, ms.float16)
    data[0] = 9
    assert tensor.tolist() == [1.0, 2.0]
    assert isinstance(tensor, ms.Tensor)
    assert isinstance(tensor, torch.Tensor)
    assert not isinstance(3, ms.Tensor)
    parameter = ms.Parameter(tensor, name="w", layerwise_parallel=True)
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, ms.Parameter)
    assert parameter.layerwise_parallel
    assert not ms.Parameter(ms.Tensor([1, 2], ms.int32)).requires_grad
    assert ms.ParameterTuple([parameter]) == (parameter,)


def test_results_print_as_numbers_and_stay_tensors():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = as_results((weight * 1.5, "text"))[0]
    assert "%s" % loss == f"{loss}" == str(loss.asnumpy()) == "3.0"
    assert f"{loss:.2f}" == "3.00"
    assert type(loss + 1) is torch.Tensor
    loss.backward()
    assert weight.grad == 1.5


def test_loss_that_is_still_on_its_way_prints_its_number():
    for show in (str, repr, "{}".format):
        loss = LateLoss.of(lambda: torch.tensor(0.25), torch.float32)
        assert show(as_results(loss)) == "0.25"
        assert type(loss) is Printed
    assert float(as_results(LateLoss.of(lambda: torch.tensor(0.25), torch.float32))) == 0.25


def test_seed_sets_every_generator():
    def draws():
        ms.set_seed(7)
        return float(torch.rand(1)), float(np.random.rand())

    assert draws() == draws()
    assert ms.get_seed() == 7
    with pytest.raises(UsageError, match="0 or more"):
        ms.set_seed(-1)


def test_jit_leaves_functions_as_they_are():
    def double(x):
        return 2 * x

    assert ms.jit(double) is double
    assert ms.jit(mode="PIJit")(double) is double
    assert ms.ms_function is ms.jit
    with pytest.raises(UsageError, match="decorate a function"):
        ms.jit(3)


@pytest.fixture
def fresh_context(monkeypatch):
    monkeypatch.setattr(context, "_chosen", {})
    monkeypatch.setattr(table, "_noted", set())
    for name in (contract.DEVICE_ID, contract.MSRUN_DEVICE_TARGET):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("fresh_context")
def test_context_is_set_checked_and_told(logged):
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", device_id=3)
    assert (ms.get_context("mode"), ms.get_context("device_target"), ms.get_context("device_id")) == (0, "CPU", 3)
    assert os.environ[contract.DEVICE_ID] == "3"
    assert not logged
    ms.set_context(save_graphs=2)
    ms.set_context(save_graphs=0, max_device_memory="8GB")
    assert ms.get_context("save_graphs") == 0
    assert ms.get_context("max_call_depth") == 1000
    assert [record.getMessage().split(" is ")[0] for record in logged] == [
        "set_context(save_graphs=...)",
        "set_context(max_device_memory=...)",
    ]
    if not torch.cuda.is_available():
        ms.set_context(device_target="Ascend")
        assert "not here, this process computes on cpu" in logged[-1].getMessage()
    for words, match in (
        ({"device_target": "TPU"}, "one of Ascend, GPU, CPU"),
        ({"mode": 2}, "GRAPH_MODE or PYNATIVE_MODE"),
        ({"device_id": -1}, "0 or more"),
        ({"device_targe": "CPU"}, "did you mean device_target"),
        ({"save_graph": True}, "did you mean save_graphs"),
    ):
        with pytest.raises(UsageError, match=match):
            ms.set_context(**words)
    with pytest.raises(UsageError, match="unknown word"):
        ms.get_context("devise_id")


@pytest.mark.usefixtures("fresh_context")
def test_context_before_it_is_set_tells_what_is_done():
    assert ms.get_context("device_target") in ("CPU", "GPU", "Ascend")
    assert ms.get_context("device_id") == 0


def run(folder, *words):
    command = [sys.executable, "-m", "msrun.mindspore", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_script_with_mindspores_imports_runs_unchanged(tmp_path):
    paths = sorted({path.rpartition(".")[0] or path for path in import_paths.ALIASES})
    (tmp_path / "beside.py").write_text("from mindspore.ops import functional\n")
    (tmp_path / "script.py").write_text(
        "import sys\nimport mindspore as ms, beside\nfrom mindspore import nn\n"
        "import mindspore.dataset.vision.c_transforms as vision\n"
        "import mindspore.dataset.transforms.c_transforms as C\n"
        "from mindspore.train.callback import LossMonitor\nfrom mindspore.common.initializer import Normal\n"
        "from mindspore.nn.utils.init import no_init_parameters\n"
        "from mindspore.communication.management import init\nfrom mindspore.ops import operations as P\n"
        f"import {', '.join(f'mindspore.{path}' for path in [*import_paths.ALIASES, *paths])}\n"
        "import msrun.mindspore\n"
        "assert ms is msrun.mindspore and vision.Resize and C.TypeCast and P.MatMul\n"
        "print(sys.argv, __name__, nn.Dense(2, 3))\n"
    )
    done = run(tmp_path, "script.py", "--a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['script.py', '--a', 'b'] __main__ Dense(in_features=2")


@pytest.mark.slow
def test_module_with_mindspores_imports_runs_unchanged(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nfrom mindspore import nn\nprint(sys.argv, __name__, nn.ReLU())\n")
    done = run(tmp_path, "-m", "script", "c")
    assert done.returncode == 0, done.stderr
    assert "'c'] __main__ ReLU()" in done.stdout


@pytest.mark.parametrize("words", [[], ["none.py"], ["-x"], ["-m"]])
def test_runner_without_a_script_says_what_to_give(words):
    with pytest.raises(SystemExit) as ended:
        run_script(words)
    assert str(ended.value.code).startswith("msrun.mindspore: error: ")
    assert "usage: python -m msrun.mindspore SCRIPT" in str(ended.value.code)


def test_operator_is_sent_to_the_host_in_mindspores_words():
    x = torch.randn(2, 3)
    for operator in (ops.ReLU().add_prim_attr("primitive_target", "CPU"), ops.ReLU().set_device("GPU")):
        assert torch.equal(operator(x), torch.relu(x))
        call_targeted = operator._run
        assert vars(call_targeted)["_msrun_target"].function is torch.relu
    both = ops.ReLU().set_device("CPU").set_device("Ascend")
    assert vars(both._run)["_msrun_target"].target == "device", "the last word counts"
    with pytest.raises(UsageError, match="must be one of CPU, Ascend, GPU, DEVICE"):
        ops.ReLU().set_device("TPU")
    with pytest.raises(UsageError, match='only "primitive_target" means something here'):
        ops.ReLU().add_prim_attr("enable_nd_tp", value=True)


def test_print_is_left_out_of_a_captured_graph(capsys):
    def double(x):
        ops.Print()("x is", x)
        return x * 2

    assert torch.compile(double, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert capsys.readouterr().out == ""
    double(torch.ones(2))
    assert capsys.readouterr().out == "x is\n[1. 1.]\n"
