"""An unmodified Llama of transformers on 65,536 ranks that do not exist."""

import json
import os
from pathlib import Path

import pytest
from job_runner import WORKER_PATH

from zoo.packages import missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

DEADLINE_S = 600.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S)]
SCRIPT = """
from zoo.packages import prepare_torchvision
prepare_torchvision()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from msrun.runtime import AutoParallel, init
from zoo.language import Loss

init()
config = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)
net = Loss(LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(net.parameters())
step = AutoParallel(net).hsdp(threshold=0, optimizer_level="level3", shard_size=64)
words = torch.randint(1000, (1, 64))
step(words, words).backward()
"""
ELEMENTS = 2 * 128256 * 4096 + 4096 + 4 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096)
"""Embedding and head; the last norm; four layers of attention, gated products and two norms."""


def test_llama_is_dry_run_on_65536_ranks_and_takes_no_memory_for_its_parameters(msrun, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = msrun.run(
        *("--sim_level=2", "--sim_device=h100", "--worker_num=65536", "train.py"),
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([WORKER_PATH, str(Path(__file__).parents[1])])},
        deadline_s=DEADLINE_S,
    )
    assert done.code == 0, done.stderr
    report = json.loads((tmp_path / "log_output" / "simulation.json").read_text())
    (alike,) = report["classes"]
    assert alike["last_rank"] == 65535
    assert alike["memory"]["parameter_bytes"] == 4 * ELEMENTS // 64
    assert report["step"]["seconds"] > 0
