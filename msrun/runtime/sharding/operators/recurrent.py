"""Rule for recurrent networks: torch's lstm, gru and rnn, one operator for all layers and steps."""

from __future__ import annotations

import torch

from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, Rule

_SAMPLES = "b"


class Recurrent(Rule):
    """Samples may be cut; steps, features and weights stay whole. With dropout between layers nothing is cut, as the
    operator draws its masks itself."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Label the samples: of the sequence as `batch_first` says, of the states dimension 1."""
        shapes = call.shapes
        is_cut = len(shapes[0]) == 3 and not (call.argument("dropout") and call.argument("train"))
        samples = 0 if call.argument("batch_first") else 1
        hidden = call.node.args[1]
        states = len(hidden) if isinstance(hidden, list | tuple) else 1

        def labels(ndim: int, dim: int) -> Labels:
            return tuple(_SAMPLES if is_cut and i == dim else None for i in range(ndim))

        sequence, state = labels(len(shapes[0]), samples), labels(len(shapes[0]), 1)
        weights: list[Labels] = [(None,) * len(shape) for shape in shapes[1 + states :]]
        return Form(
            (sequence, *(state,) * states, *weights),
            sequence,
            {_SAMPLES: shapes[0][samples]} if is_cut else {},
            others=(state,) * states,
        )


aten = torch.ops.aten
RULES = [(Recurrent(), [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input])]
