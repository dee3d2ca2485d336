"""Names that are not here are errors that help, scripts are checked before they start, words keep their meaning, and
operators, tensors and settings are in MindSpore's."""

import importlib
import inspect
import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from document_listings import listings

import msrun.mindspore as ms
from msrun import contract
from msrun.errors import StrategyError, UsageError
from msrun.mindspore import _checkparam, amp, context, import_paths, nn, ops
from msrun.mindspore.__main__ import main
from msrun.mindspore.missing import check, report
from msrun.mindspore.ops import table
from msrun.mindspore.tensor import Printed, as_results
from msrun.runtime.parallel.border import LateLoss
from msrun.runtime.sharding.named_layout import gathered_layouts


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (ms.nn, "Dens", "mindspore.nn.Dens is not in msrun.mindspore (did you mean Dense?)"),
        (ms.ops, "CTCLossV9", "mindspore.ops.CTCLossV9 is not in msrun.mindspore"),
        (ms, "mindrecord", "give them to dataset.GeneratorDataset"),
        (ms.dataset, "MindDataset", "MindRecord files are not read here; use dataset.GeneratorDataset"),
        (ms.nn, "FractionalMaxPool2d", "use torch.nn.FractionalMaxPool2d: tensors and cells here are torch's"),
        (ms.numpy, "piecewise", "is not in msrun.mindspore"),
        (ms.mint, "vdt", "did you mean vdot?"),
    ],
)
def test_missing_name_says_what_is_near_and_what_to_use(module, name, text):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as raised:
        getattr(module, name)
    assert text in str(raised.value)


def test_import_of_a_missing_name_says_the_same():
    with pytest.raises(ImportError, match=r"Dens is not in msrun\.mindspore.*did you mean Dense"):
        from msrun.mindspore.nn import Dens  # noqa: F401


SCRIPT = """
import mindspore as ms
from mindspore import nn, ops
import mindspore.dataset as ds
from mindspore.common.initializer import Normal

net = nn.Conv2d(1, 2, 3, pad_mod="same")
data = ds.MindDataset("x")
total = ops.ReduceSum(keep_dim=True)(ops.Tile()(net.weight, (1, 2)))
net.sync_batch()
ms.set_context(mode=0, save_graphs=True)
print(ops.Nothing, ms.mint.nn.functional.relu, nn.Dense(2, 3, weight_init=Normal()), total.asnumpy())
print(ms.__version__.split("."))
"""


def test_check_finds_names_keywords_and_methods_before_anything_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "right.py").write_text("from mindspore import nn\nprint(nn.Dense(2, 3, has_bias=False))\n")
    (tmp_path / "other.py").write_text("import torch\n")
    findings, count = check([tmp_path])
    found = {(one.line, one.name) for one in findings}
    assert found == {
        (7, "mindspore.nn.Conv2d(pad_mod=)"),
        (8, "mindspore.dataset.MindDataset"),
        (9, "mindspore.ops.ReduceSum(keep_dim=)"),
        (10, ".sync_batch"),
        (12, "mindspore.ops.Nothing"),
    }
    assert count == 2
    text, status = report([tmp_path])
    assert status == 1
    assert f"{script}:8: mindspore.dataset.MindDataset is not in msrun.mindspore" in text
    assert "MindRecord files are not read here; use dataset.GeneratorDataset" in text
    assert "did you mean pad_mode?" in text
    assert text.endswith("1 of 2 files that import mindspore find all they name, 50 %")


def test_check_is_a_command_with_an_exit_status(tmp_path, capsys):
    (tmp_path / "right.py").write_text("import mindspore.nn as nn\nnn.Dense(2, 3)\n")
    for words, status in ((["--check", str(tmp_path)], 0), (["--check"], 1), (["--check", str(tmp_path / "no")], 1)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == status or (status and str(ended.value.code).startswith("msrun.mindspore: error: "))
    assert "1 of 1 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ops.ReduceSum(keepdims=True), "did you mean keep_dims"),
        (lambda: ops.Add(1), "it takes no settings"),
        (lambda: nn.LeakyReLU(slope=0.1), "LeakyReLU"),
        (lambda: ms.jit(jit_leve="O0"), "did you mean jit_level"),
        (lambda: ms.Profiler(output_pat="x"), "did you mean output_path"),
        (lambda: nn.Dense(2, 3).to_float(ms.int32), "float16, bfloat16 or float32"),
        (lambda: nn.Momentum([{"params": [ms.Parameter(torch.ones(1))], "rate": 1}], 0.1, 0.9), "known are params"),
        (lambda: nn.Momentum([], 0.1, 0.9), "give net.trainable_params"),
        (lambda: nn.get_activation("relo"), "did you mean relu"),
        (lambda: ops.MultitypeFuncGraph("f")(1), "no function is registered"),
        (lambda: amp.FixedLossScaleManager(0.5), "1 or more"),
        (lambda: ops.kl_div(torch.rand(2), labels=torch.rand(2), reductio="sum"), "kl_div: .*did you mean reduction"),
        (lambda: ms.Model(nn.Dense(2, 3), nn.MSELoss(), optimiser=None), "Model: .*did you mean optimizer"),
        (lambda: ms.save_checkpoint(nn.Dense(2, 3), "net", append_dic={}), "did you mean append_dict"),
        (lambda: ms.set_context(device_targe="CPU"), "did you mean device_target.*that act here are"),
        (lambda: nn.PReLU(chanel=2), "nn.PReLU: .*did you mean channel"),
    ],
)
def test_wrong_words_are_errors_with_a_remedy(call, match):
    with pytest.raises(UsageError, match=match):
        call()


def test_arguments_in_the_words_of_a_table_are_mindspores_in_help_calls_and_errors():
    words = inspect.signature(nn.Conv2d).parameters
    assert list(words)[:5] == ["in_channels", "out_channels", "kernel_size", "stride", "pad_mode"]
    assert words["pad_mode"].default == "same"
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    assert torch.equal(ops.kl_div(x, labels=y, reduction="sum"), torch.nn.functional.kl_div(x, y, reduction="sum"))
    assert torch.equal(
        torch.compile(lambda a, b: ops.cosine_similarity(a, b, dim=0), backend="eager", fullgraph=True)(x, y),
        torch.cosine_similarity(x, y, 0),
    )
    for call, match in (
        (lambda: ops.kl_div(x), "missing a required argument: 'labels'"),
        (lambda: ops.kl_div(x, y, reduce="sum"), "unexpected keyword argument 'reduce'"),
        (lambda: ops.kl_div(x, y, logits=x), "multiple values for argument 'logits'"),
        (lambda: ops.kl_div(x, y, "sum", 1), "too many positional arguments"),
    ):
        with pytest.raises(TypeError, match=match):
            call()


def test_rmsprop_changes_the_rows_of_a_sparse_gradient_alone():
    table = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = nn.RMSProp([table], 0.1)
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2), check_invariants=False)
    optimizer.step()
    assert table[[0, 2]].eq(1).all()
    assert table[1].lt(1).all()


def test_parameters_do_not_share_memory_with_what_they_were_made_of():
    data = ms.Tensor(np.ones(2, np.float32))
    first, second = ms.Parameter(data, name="a"), ms.Parameter(data, name="b")
    first.set_data(ms.Tensor([5.0, 5.0]))
    assert second.asnumpy().tolist() == data.asnumpy().tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match=r"shape \(3,\) for parameter a of \(2,\)"):
        first.set_data(ms.Tensor([1.0, 2.0, 3.0]))


def test_torchs_meaning_of_a_method_stays_without_mindspores_words():
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert torch.equal(x.transpose(0, 1), x.T)
    assert x.max(1).values.tolist() == [2.0, 5.0]
    assert torch.equal(x.std(dim=0), torch.std(x, dim=0))
    assert x.size(0) == 2
    assert repr(x).startswith("tensor(")


def test_exported_network_runs_without_its_class(tmp_path):
    net = nn.SequentialCell(nn.Dense(2, 3, weight_init="ones"), nn.ReLU())
    x = ms.Tensor(np.ones((1, 2), np.float32))
    ms.export(net, x, file_name=str(tmp_path / "net"), file_format="MINDIR")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(loaded(x), net(x))


def test_profiler_writes_a_trace_of_the_rank(tmp_path):
    profiler = ms.Profiler(output_path=str(tmp_path / "data"))
    nn.Dense(2, 3)(ms.Tensor(np.ones((1, 2), np.float32)))
    profiler.analyse()
    assert "addmm" in (tmp_path / "data" / "rank_0.json").read_text()


def test_checks_of_arguments_are_those_of_the_documents():
    validator = _checkparam.Validator
    assert validator.check_positive_int(3, "size") == 3
    for call in (lambda: validator.check_positive_int(0, "size"), lambda: validator.check_string("a", ["b"], "word")):
        with pytest.raises(ValueError, match="must be"):
            call()
    with pytest.raises(TypeError, match="'sparse' must be of type bool"):
        validator.check_value_type("sparse", 1, [bool], "Net")


@pytest.mark.parametrize("target", ["CPU", "DEVICE"])
def test_listings_of_the_heterogeneous_document_train_as_the_ready_made_optimizer_does(target):
    document = {"validator": _checkparam.Validator}
    for listing in listings("heterogeneous"):
        exec("".join(listing.lines).replace("mindspore", "msrun.mindspore"), document)
    weights = []
    for make in (document["AdamWeightDecayOp"], nn.AdamWeightDecay):
        table = document["EmbeddingLookup"](10, 4, "ones", target)
        net = nn.SequentialCell(table, nn.Dense(4, 1, weight_init="ones", bias_init="zeros"))
        optimizer = make(net.trainable_params(), 0.1, weight_decay=0.1)
        gradients = ms.value_and_grad(lambda rows, net=net: (net(rows) ** 2).mean(), None, optimizer.parameters)
        for _ in range(3):
            optimizer(gradients(ms.Tensor([[1, 2], [3, 3]], ms.int32))[1])
        weights.append([parameter.asnumpy() for parameter in optimizer.parameters])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)  # its betas are tensors of 32 bits


def test_cell_computes_in_16_bits_and_its_weights_stay_in_32():
    net = nn.SequentialCell(nn.Dense(2, 3), nn.ReLU()).to_float(ms.float16)
    loss = net(ms.Tensor(np.ones((1, 2), np.float32))).sum()
    loss.backward()
    assert loss.dtype == ms.float16
    assert {(parameter.dtype, parameter.grad.dtype) for parameter in net.get_parameters()} == {(ms.float32, ms.float32)}


def test_every_dynamic_loss_scale_follows_the_overflows_alike():
    manager, scaler = ms.DynamicLossScaleManager(4, 2, 2), amp.DynamicLossScaler(4, 2, 2)
    cell, scale = nn.DynamicLossScaleUpdateCell(4, 2, 2), torch.tensor(4.0)
    for overflow, expected in zip(
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1], [4, 8, 8, 4, 4, 8, 8, 16, 8, 4, 2, 1, 1], strict=True
    ):
        manager.update_loss_scale(bool(overflow))
        scaler.adjust(not overflow)
        cell(scale, torch.tensor(bool(overflow)))
        assert (manager.get_loss_scale(), float(scaler.scale_value), float(scale)) == (expected,) * 3


def test_log_says_what_the_variable_lets_through(logged, monkeypatch):
    for level, said in (("1", ["info", "error"]), ("3", ["error"])):
        monkeypatch.setenv("GLOG_v", level)
        logged.clear()
        ms.log.debug("debug")
        ms.log.info("%s", "info")
        ms.log.error("error")
        assert [record.getMessage() for record in logged] == said


def test_step_with_a_loss_scale_leaves_out_what_overflows():
    net = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
    scale = nn.DynamicLossScaleUpdateCell(2.0**20, 2, 2)
    step = nn.TrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1), scale
    )
    label = ms.Tensor(np.zeros((1, 1), np.float32))
    _, overflow, _ = step(ms.Tensor(np.full((1, 2), np.inf, np.float32)), label)
    assert bool(overflow)
    assert net.weight.asnumpy().tolist() == [[1.0, 1.0]]
    loss, overflow, used = step(ms.Tensor(np.ones((1, 2), np.float32)), label)
    assert (float(loss), bool(overflow), float(used)) == (4.0, False, 2.0**19)
    np.testing.assert_allclose(net.weight.asnumpy(), [[0.6, 0.6]], rtol=1e-6)


def test_init_again_changes_nothing():
    ms.communication.init()
    try:
        ms.communication.init()
        assert ms.communication.get_group_size() == 1
    finally:
        ms.communication.release()


def test_a_longer_path_leads_to_the_same_module_by_attributes_as_by_import():
    for alias, target in import_paths.ALIASES.items():
        here = ms
        for part in alias.split("."):
            here = getattr(here, part)
        if isinstance(here, ModuleType):
            assert here is (importlib.import_module(f"msrun.mindspore.{target}") if target else ms), alias


def test_wrappers_of_networks_have_the_methods_of_cells():
    net = ms.parallel.nn.Pipeline(nn.SequentialCell(nn.Dense(2, 2)), 2)
    assert net.set_train().training
    assert len(net.trainable_params()) == 2


def test_every_module_has_all_names_that_it_promises():
    own = [module for name, module in list(sys.modules.items()) if name.startswith("msrun.mindspore")]
    for module in own:
        assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == [], module.__name__


# -- operators, tensors and settings ----------------------------------------------------------------------------------

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
        main(words)
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
