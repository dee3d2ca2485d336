"""ClientConfig: from the name of a host to an SshTarget, by the rules of ssh_config(5)."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from pathlib import Path

from msrun.errors import UsageError
from msrun.launch.transport.ssh.algorithms import KEYWORDS
from msrun.launch.transport.ssh.config_file import ConfigFiles, HostOptions
from msrun.launch.transport.ssh.target import DEFAULT_PORT, SshTarget
from msrun.launch.transport.ssh.tokens import check_command_word, expand_path, expand_tokens, local_tokens
from msrun.planning.hosts.host_entry import MAX_PORT
from msrun.planning.hosts.ssh_settings import NO_CONFIG, HostKeyPolicy, SshSettings

USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
DEFAULT_IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
DEFAULT_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
MAX_HOPS = 8
MIN_RSA_BITS = 1024
"""RequiredRSASize of ssh, unless ssh_config says more."""
_STRICTNESS: dict[str, HostKeyPolicy] = {"accept-new": "accept-new", "no": "off", "off": "off"}
"""StrictHostKeyChecking; whatever else it is, yes and ask too, is strict, for nobody is asked."""
_IGNORED = {
    "bindaddress": "BindAddress",
    "bindinterface": "BindInterface",
    "canonicalizehostname": "CanonicalizeHostname",
    "certificatefile": "CertificateFile",
    "knownhostscommand": "KnownHostsCommand",
    "pkcs11provider": "PKCS11Provider",
    "rekeylimit": "RekeyLimit",
    "securitykeyprovider": "SecurityKeyProvider",
    "verifyhostkeydns": "VerifyHostKeyDNS",
}
"""What changes a connection of ssh and not one of msrun; without any of them fewer hosts are let pass, not more."""
_JUMP = re.compile(r"(?:ssh://)?(?:(.+)@)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:@/]+))(?::(\d+))?/?\Z")
_SECONDS = re.compile(r"(\d+)([smhdw]?)\Z", re.IGNORECASE)
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Tokens = dict[str, Callable[[], str]]


class ClientConfig:
    """What the user's and the system's ssh_config, or the file of --ssh_config, say of hosts. Used by one thread."""

    def __init__(self, settings: SshSettings) -> None:
        """Read nothing yet."""
        self._settings = settings
        self._local_user = getpass.getuser()
        self._files = ConfigFiles(self._expand_match)
        self.ignored: set[str] = set()
        """Keywords that were given for some host and that msrun does not know."""

    def resolve(self, name: str, *, user: str = "", port: int = 0) -> SshTarget:
        """Return how to get to a host.

        Args:
            user: of the host list; empty = --ssh_user, else ssh_config, else the user here.
            port: of the host list; 0 = --ssh_port, else ssh_config, else 22.

        Raises:
            UsageError: ssh_config cannot be read or understood, or says what cannot be done.
        """
        given = {"user": user or self._settings.user, "port": str(port or self._settings.port or "")}
        return self._resolve(name, {key: value for key, value in given.items() if value}, None, 0)

    def _resolve(self, name: str, given: dict[str, str], jumps: list[str] | None, depth: int) -> SshTarget:
        if depth > MAX_HOPS:
            raise UsageError(f"{name}: more than {MAX_HOPS} jump hosts, one behind the other; is there a loop?")
        check_command_word("host", name)
        options = self._read(name, given)
        self._note_ignored(options)
        host_name = options.first("hostname", default=name)
        user = options.first("user", default=self._local_user)
        check_command_word("HostName", host_name)
        check_command_word("User", user)
        tokens = self._tokens(options)
        port = _port(options)
        via, command = self._route(options, tokens, jumps, depth)
        plain = options.first("hostkeyalias") or host_name.lower()
        with_port = f"[{plain}]:{port}" if port != DEFAULT_PORT and not options.first("hostkeyalias") else plain
        named = self._identities(options, tokens)
        return SshTarget(
            name=name,
            host_name=host_name,
            user=user,
            port=port,
            identity_files=named or tuple(Path(path).expanduser() for path in DEFAULT_IDENTITIES),
            named_identity_files=frozenset(named),
            identities_only=options.first("identitiesonly").lower() in ("yes", "true"),
            agent_socket=self._agent_socket(options, tokens),
            may_prompt=options.first("batchmode").lower() not in ("yes", "true"),
            via=via,
            proxy_command=command,
            known_hosts_files=_paths(options, "userknownhostsfile", DEFAULT_KNOWN_HOSTS, tokens),
            global_known_hosts_files=_paths(options, "globalknownhostsfile", DEFAULT_GLOBAL_KNOWN_HOSTS, tokens),
            host_key_name=with_port,
            plain_host_key_name=plain if plain != with_port else "",
            certificate_name=plain,
            revoked_host_keys=_path(options, "revokedhostkeys", tokens),
            algorithms=tuple((word, options.values[word]) for word in KEYWORDS if word in options.values),
            min_rsa_bits=_bits(options),
            host_keys=self._settings.host_keys
            or _STRICTNESS.get(options.first("stricthostkeychecking").lower(), "strict"),
            hash_known_hosts=options.first("hashknownhosts").lower() in ("yes", "true"),
            tcp_time_out_s=_seconds(options),
            address_family=options.first("addressfamily", default="any").lower(),
        )

    def _note_ignored(self, options: HostOptions) -> None:
        asked = {word for word in _IGNORED if options.first(word, default="no").lower() not in ("no", "none")}
        self.ignored |= {_IGNORED[word] for word in asked | (options.lists.keys() & _IGNORED.keys())}
        if options.first("proxyusefdpass").lower() in ("yes", "true"):
            raise UsageError(
                f"{options.name}: ssh_config: ProxyUseFdpass yes: not supported; let the ProxyCommand pass the bytes"
            )

    def _read(self, name: str, given: dict[str, str]) -> HostOptions:
        """Return what the files say of a host; read again, with its true name, where they have a Match final."""
        options = HostOptions(name, self._local_user, dict(given))
        self._apply(options)
        if options.wants_final:
            options.is_final = True
            self._apply(options)
        if "hostname" in options.values:
            text = options.values["hostname"]
            options.values["hostname"] = expand_tokens(text, {"h": lambda: name}, "ssh_config: HostName")
        return options

    def _apply(self, options: HostOptions) -> None:
        given = self._settings.config_file
        if given is not None:
            if str(given) != NO_CONFIG:
                self._files.apply(given, options, is_wanted=True)
            return
        for path in (USER_CONFIG, SYSTEM_CONFIG):
            self._files.apply(Path(path).expanduser(), options, is_wanted=False)

    def _tokens(self, options: HostOptions) -> Tokens:
        return {
            **local_tokens(self._local_user),
            "h": lambda: options.first("hostname", default=options.name),
            "k": lambda: options.first("hostkeyalias", default=options.name),
            "n": lambda: options.name,
            "p": lambda: options.first("port", default=str(DEFAULT_PORT)),
            "r": lambda: options.first("user", default=self._local_user),
        }

    def _expand_match(self, text: str, options: HostOptions) -> str:
        return expand_tokens(text, self._tokens(options), "ssh_config: Match exec")

    def _identities(self, options: HostOptions, tokens: Tokens) -> tuple[Path, ...]:
        texts = [text for text in options.lists.get("identityfile", []) if text.lower() != "none"]
        configured = [expand_path(text, tokens, "ssh_config: IdentityFile") for text in texts]
        given = [path.expanduser() for path in self._settings.identity_files]
        return tuple(dict.fromkeys([*given, *configured]))

    @staticmethod
    def _agent_socket(options: HostOptions, tokens: Tokens) -> str:
        text = options.first("identityagent", default="SSH_AUTH_SOCK")
        if text.lower() == "none":
            return ""
        if text == "SSH_AUTH_SOCK" or (text.startswith("$") and not text.startswith("${")):
            return os.environ.get(text.removeprefix("$"), "")
        return str(expand_path(text, tokens, "ssh_config: IdentityAgent"))

    def _route(
        self, options: HostOptions, tokens: Tokens, jumps: list[str] | None, depth: int
    ) -> tuple[SshTarget | None, str]:
        """Return jump host and ProxyCommand, one of the two or none; what ssh_config names first holds."""
        if jumps is None:
            first = next((key for key in options.values if key in ("proxyjump", "proxycommand")), "")
            text = options.first(first)
            if text.lower() in ("", "none"):
                return None, ""
            some = {key: tokens[key] for key in "hnpr"}
            if first == "proxycommand":
                return None, expand_tokens(text, some, "ssh_config: ProxyCommand")
            jumps = [word.strip() for word in expand_tokens(text, some, "ssh_config: ProxyJump").split(",")]
        if not jumps:
            return None, ""
        name, given = _parse_jump(jumps[-1])
        # A list says the whole way; without one the way to the last hop is that of its own ssh_config.
        return self._resolve(name, given, jumps[:-1] if len(jumps) > 1 else None, depth + 1), ""


def _parse_jump(text: str) -> tuple[str, dict[str, str]]:
    """Turn `[user@]host[:port]` or ssh://[user@]host[:port] into a name and what it says of it."""
    match = _JUMP.match(text)
    if not match:
        raise UsageError(f"ssh_config: ProxyJump {text}: write [user@]host[:port]")
    given = {"user": match[1] or "", "port": match[4] or ""}
    return match[2] or match[3], {key: value for key, value in given.items() if value}


def _port(options: HostOptions) -> int:
    text = options.first("port", default=str(DEFAULT_PORT))
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_PORT):
        raise UsageError(f"{options.name}: ssh_config: Port {text}: must be 1 to {MAX_PORT}")
    return int(text)


def _seconds(options: HostOptions) -> float:
    text = options.first("connecttimeout", default="0")
    if text.lower() == "none":
        return 0.0
    match = _SECONDS.match(text)
    if not match:
        raise UsageError(f"{options.name}: ssh_config: ConnectTimeout {text}: give seconds such as 10")
    return float(int(match[1]) * _UNIT_S[match[2].lower()])


def _bits(options: HostOptions) -> int:
    text = options.first("requiredrsasize", default=str(MIN_RSA_BITS))
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise UsageError(f"{options.name}: ssh_config: RequiredRSASize {text}: give a number of bits such as 2048")
    return int(text)


def _path(options: HostOptions, keyword: str, tokens: Tokens) -> Path | None:
    text = options.first(keyword, default="none")
    return None if text.lower() == "none" else expand_path(text, tokens, f"ssh_config: {keyword}")


def _paths(options: HostOptions, keyword: str, defaults: tuple[str, ...], tokens: Tokens) -> tuple[Path, ...]:
    texts = options.lists.get(keyword) or defaults
    return tuple(expand_path(text, tokens, f"ssh_config: {keyword}") for text in texts if text.lower() != "none")
