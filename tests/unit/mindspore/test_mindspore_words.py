"""Names that are not here are errors that help, scripts are checked before they start, words keep their meaning."""

import importlib
import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from document_listings import listings

import msrun.mindspore as ms
from msrun.errors import UsageError
from msrun.mindspore import _checkparam, amp, nn, ops
from msrun.mindspore.__main__ import main
from msrun.mindspore.import_paths import ALIASES
from msrun.mindspore.missing import check, report


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
    for alias, target in ALIASES.items():
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
