"""Windows over the parts of a cut dimension: what is joined is the padded tensor's window; gradients go back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.halo import (
    Message,
    Window,
    add_gradients,
    gradient_message,
    join_window,
    window_message,
)


def exchange(messages: list[Message]) -> list[list[Tensor]]:
    """Return what every rank gets when all send at once."""
    sent = [message.flat.split(message.send_sizes) for message in messages]
    received = [torch.cat([parts[rank] for parts in sent]) for rank in range(len(messages))]
    return [message.pieces(flat) for message, flat in zip(messages, received, strict=True)]


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, Window]:
    count, part = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    window = Window(
        count * part,
        draw(st.integers(0, 6)),
        draw(st.integers(-5, 5)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([0.0, -7.5])),
    )
    return count, window


def padded(whole: Tensor, window: Window, index: int) -> Tensor:
    """Return the window of a rank, row by row."""
    rows = range(window.start(index), window.start(index) + window.length)
    none = torch.full_like(whole[:, 0], window.fill)
    return torch.stack([whole[:, row] if 0 <= row < window.size else none for row in rows], 1)


@settings(max_examples=50, deadline=None)
@given(windows())
def test_joined_pieces_are_the_window_of_the_padded_tensor(drawn: tuple[int, Window]) -> None:
    count, window = drawn
    whole = torch.randn(2, window.size, 3, dtype=torch.float64)
    parts = whole.chunk(count, 1)
    received = exchange([window_message(parts[i], 1, window, i, count) for i in range(count)])
    for index in range(count):
        joined = join_window(parts[index], received[index], 1, window, index, count)
        assert torch.equal(joined, padded(whole, window, index))


@settings(max_examples=50, deadline=None)
@given(windows())
def test_gradients_of_windows_are_added_to_the_rows_that_they_read(drawn: tuple[int, Window]) -> None:
    count, window = drawn
    whole = torch.randn(2, window.size, 3, dtype=torch.float64, requires_grad=True)
    gradients = [torch.randn(2, window.length, 3, dtype=torch.float64) for _ in range(count)]
    loss = sum((padded(whole, window, i) * gradients[i]).sum() for i in range(count))
    right = torch.zeros_like(whole)
    if loss.requires_grad:  # type: ignore[union-attr]
        (right,) = torch.autograd.grad(loss, whole)  # type: ignore[arg-type]
    received = exchange([gradient_message(gradients[i], 1, window, i, count) for i in range(count)])
    for index, part in enumerate(right.chunk(count, 1)):
        torch.testing.assert_close(add_gradients(gradients[index], received[index], 1, window, index, count), part)


def test_nothing_is_sent_where_windows_end_with_their_parts() -> None:
    window = Window(8, 2, 0, 2)
    messages = [window_message(torch.ones(1, 2), 1, window, i, 4) for i in range(4)]
    assert [message.flat.numel() for message in messages] == [0] * 4


def test_window_may_reach_over_several_ranks() -> None:
    window = Window(4, 1, -2, 5)
    message = window_message(torch.ones(1, 1), 1, window, 1, 4)
    assert message.send_sizes == [1, 0, 1, 1]
    assert message.receive_sizes == [1, 0, 1, 1]


def test_plan_names_the_window() -> None:
    halo = Collective("halo", (0, 1), 2, window=Window(8, 2, -1, 4))
    assert str(halo) == "halo dim 2, 4 rows from -1 every 2 over axes 0,1"
    assert not halo.is_local
