"""The `msrun-checkpoint` command: looks into checkpoints and writes them otherwise, without ranks and devices.

Exit status: 0 done, 1 damaged, incomplete or not to be read, 2 wrong usage.
Every option --a_b is also accepted as --a-b.
What imports torch is imported by the command that needs it, so that --help and wrong usage are answered at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msrun import __version__
from msrun.errors import MsrunError

if TYPE_CHECKING:
    from msrun.runtime.checkpoint.directory import Manifest
    from msrun.runtime.checkpoint.reader import CheckpointReader

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 110,
}
_EXIT_FAULT, _EXIT_INTERRUPTED = 1, 130
_PATH = click.Path(path_type=Path)
_SHOWN = 20


@click.group(no_args_is_help=False, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="msrun-checkpoint", help="Show the version.")
def cli() -> None:
    """Look into checkpoints, check them, and write them otherwise. No devices and no other ranks are needed."""


@cli.command(short_help="Show what a checkpoint holds.")
@click.argument("checkpoint", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with all tensors.")
@click.option("--all", "shows_all", is_flag=True, help=f"Show all tensors, not the first {_SHOWN}.")
def inspect(checkpoint: Path, as_json: bool, shows_all: bool) -> int:
    """Show what CHECKPOINT holds, a file or a directory."""
    from msrun.runtime.checkpoint.reader import open_checkpoint

    reader, manifest = open_checkpoint([checkpoint.absolute()])
    tensors = [_describe_tensor(reader, key) for key in reader.tensors]
    if as_json:
        print(json.dumps({**asdict(manifest), "tensors": tensors}, indent=1))
        return 0
    print(f"{checkpoint}: {_describe(reader, manifest)}")
    size = sum(tensor["bytes"] for tensor in tensors)
    apart = f", in {reader.sources_count} files or directories" if reader.sources_count > 1 else ""
    print(f"{len(tensors)} tensors, {_format_bytes(size)}{apart}")
    shown = tensors if shows_all else tensors[:_SHOWN]
    width = max((len(tensor["name"]) for tensor in shown), default=0)
    for tensor in shown:
        parts = f"  in {tensor['parts']} parts" if tensor["parts"] > 1 else ""
        print(f"  {tensor['name']:<{width}}  {tensor['dtype']:<9} {tuple(tensor['shape'])}{parts}")
    if len(tensors) > len(shown):
        print(f"  ... and {len(tensors) - len(shown)} more: --all shows them")
    return 0


def _describe_tensor(reader: CheckpointReader, key: tuple[str, ...]) -> dict[str, Any]:
    stored = reader.tensors[key]
    return {
        "name": _printable(".".join(key)),
        "shape": list(stored.shape),
        "dtype": str(stored.dtype).removeprefix("torch."),
        "bytes": math.prod(stored.shape) * stored.dtype.itemsize,
        "parts": len(stored.parts),
    }


def _describe(reader: CheckpointReader, manifest: Manifest) -> str:
    if not manifest.world_size:
        return "a file that msrun has not written"
    position = manifest.position
    form = "directory of parts" if reader.path.is_dir() else "file with whole tensors"
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    epochs = "1 epoch" if position.epoch == 1 else f"{position.epoch} epochs"
    return f"{form}, written by {ranks} on {saved} after step {position.step}, {epochs} done"


@cli.command(short_help="Compare checksums.")
@click.argument("checkpoints", nargs=-1, required=True, type=_PATH)
def verify(checkpoints: tuple[Path, ...]) -> int:
    """Read all files of CHECKPOINTS and compare their checksums with those that were written."""
    from msrun.runtime.checkpoint.reader import verify_checkpoint

    status = 0
    for checkpoint in checkpoints:
        checked = list(verify_checkpoint(checkpoint.absolute()))
        faults = [file for file in checked if file.fault]
        for file in faults:
            _print_note(f"{file.path}: {file.name} is damaged: {file.fault}")
        status = _EXIT_FAULT if faults else status
        if not faults:
            size = _format_bytes(sum(file.bytes_count for file in checked))
            kind = "files" if checked[0].path.is_dir() else "records"
            text = f"{len(checked)} {kind}, {size}, all checksums are right"
            if not all(file.is_summed for file in checked):
                text = f"{len(checked)} files, {size}, sizes are right; an earlier version wrote it, without checksums"
            print(f"{checkpoint}: {text}")
    return status


@cli.command(short_help="Cut a checkpoint as a strategy file says.")
@click.argument("source", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--strategy", type=_PATH, help="Strategy file: how to cut. Left out: whole tensors, for one rank.")
@click.option("--src_strategy", type=_PATH, help="How SOURCE was cut; only for plain torch.save files of slices.")
@click.option("--prefix", default="", help="Begins the names of the new checkpoints.")
def transform(source: Path, folder: Path, strategy: Path | None, src_strategy: Path | None, prefix: str) -> int:
    """Cut SOURCE, a checkpoint or a folder with rank_0, rank_1, ..., as a strategy file says.

    The checkpoint of rank N is FOLDER/rank_N/PREFIXN.ckpt.
    """
    from msrun.runtime.checkpoint.transform import transform_checkpoints

    transform_checkpoints(source, folder, prefix, src_strategy, strategy)
    return 0


@cli.command(short_help="Write one file with whole tensors.")
@click.argument("source", type=_PATH)
@click.argument("file", type=_PATH)
@click.option("--src_strategy", type=_PATH, help="How SOURCE was cut; only for plain torch.save files of slices.")
def merge(source: Path, file: Path, src_strategy: Path | None) -> int:
    """Write SOURCE, a checkpoint or a folder with rank_0, rank_1, ..., as one FILE with whole tensors."""
    from msrun.runtime.checkpoint.reader import find_rank_checkpoints, open_source
    from msrun.runtime.checkpoint.transform import write_whole

    write_whole(*open_source(find_rank_checkpoints(source), src_strategy), file)
    return 0


@cli.command(short_help="Write the network as safetensors.")
@click.argument("checkpoint", type=_PATH)
@click.argument("file", type=_PATH)
@click.option("--max_shard_size", help="Bytes, such as 5GB, that no file exceeds: several files and an index then.")
def export(checkpoint: Path, file: Path, max_shard_size: str | None) -> int:
    """Write the network's tensors of CHECKPOINT as safetensors FILE."""
    from msrun.runtime.checkpoint.transform import export_checkpoint

    for path in export_checkpoint(checkpoint, file, max_shard_size=max_shard_size):
        print(path)
    return 0


def _format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _printable(text: str) -> str:
    """Return one line, whatever stands in names that somebody else gave."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _print_note(text: str) -> None:
    print("msrun-checkpoint: " + _printable(" ".join(text.split())), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (the process's own by default), print, and return the exit status."""
    try:
        given = None if arguments is None else list(arguments)
        return int(cli.main(args=given, prog_name="msrun-checkpoint", standalone_mode=False) or 0)
    except click.ClickException as error:
        _print_note(f"error: {error.format_message().rstrip('.')}; see msrun-checkpoint --help")
        return error.exit_code
    except (MsrunError, OSError) as error:
        from msrun.runtime.agreement import describe

        _print_note(f"error: {describe(error)}")
        return _EXIT_FAULT
    except (KeyboardInterrupt, click.Abort):
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
