#!/usr/bin/env bash
# host.sh [KEYS]: a host of a job. Runs an SSH server on port $PORT (2222), without root, that lets its own user in with
# the key of KEYS (/keys). KEYS/id_ed25519 is made when there is none.
set -euo pipefail
keys=${1:-/keys}
port=${PORT:-2222}

if [ ! -e "$keys/id_ed25519.pub" ]; then
    own=$(mktemp -d "$keys/new.XXXXXX")
    ssh-keygen -q -t ed25519 -N '' -C msrun -f "$own/id_ed25519"
    # ln fails where another host was first: all use the pair whose public key is there
    ln "$own/id_ed25519" "$keys/id_ed25519" 2>/dev/null && ln "$own/id_ed25519.pub" "$keys/id_ed25519.pub"
    rm -r "$own"
fi
server=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$server/host"
exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$server/host" \
    -o AuthorizedKeysFile="$keys/id_ed25519.pub" -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
    -o PidFile=none
