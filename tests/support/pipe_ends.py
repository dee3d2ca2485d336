"""Reading and writing of an agent's pipe by a test that has nothing else to do."""

from job_runner import wait_until


def read(pipe):
    """Return the next bytes; empty at the end."""
    return bytes(wait_until(lambda: (data := pipe.read()) is not None and [data], "bytes have come")[0])


def write_all(pipe, data):
    """Send all bytes; OSError when the other side has gone."""

    def is_sent():
        nonlocal data
        data = data[pipe.write(data) :]
        return not data

    wait_until(is_sent, "there is room for all")
