"""Completion of the command line in bash, zsh and fish: click's own, written to where the shell looks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from msrun.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MSRUN_COMPLETE"


def install_completion(command: click.Command, shell: str, environ: Mapping[str, str]) -> str:
    """Write the completion script of a shell and return what the user has to know.

    Args:
        shell: bash, zsh or fish; auto for the one of $SHELL.

    Raises:
        UsageError: the shell is not one of these, is too old, or the file cannot be written.
    """
    name = Path(environ.get("SHELL", "")).name if shell == "auto" else shell
    if name not in SHELLS:
        raise UsageError(
            f"--install_completion: the shell {name or 'in $SHELL'} is not one of {', '.join(SHELLS)}; "
            "give one, as in --install_completion=bash"
        )
    found = get_completion_class(name)
    assert found is not None
    path = _place(name, environ)
    try:
        source = found(command, {}, "msrun", VARIABLE).source()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--install_completion: cannot write {path} ({reason}); make that possible") from None
    return f"wrote {path}\n{_remark(name, path)}"


def _place(shell: str, environ: Mapping[str, str]) -> Path:
    """Return where the shell loads completions of the user from."""
    home = Path(environ.get("HOME") or "~").expanduser()
    if shell == "zsh":
        return home / ".zfunc" / "_msrun"
    if shell == "fish":
        return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "msrun.fish"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "bash-completion"
    return Path(environ.get("BASH_COMPLETION_USER_DIR") or data) / "completions" / "msrun"


def _remark(shell: str, path: Path) -> str:
    if shell == "zsh":
        return "add to ~/.zshrc before compinit: fpath+=~/.zfunc; then start a new shell"
    if shell == "bash":
        return f"start a new shell; without the package bash-completion add to ~/.bashrc: source {path}"
    return "start a new shell"
