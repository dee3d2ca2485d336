"""Trees of small files: hosts with their /dev, /proc and /sys, folders of programs."""


def grow(root, files):
    """Write files, path -> text or bytes, below a folder; return the folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root
