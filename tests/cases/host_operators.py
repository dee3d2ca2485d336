"""The optimizer of the heterogeneous parallel training document, line by line, in torch's words.

Steps 4 and 5 of the document: weights and gradients to float32, the optimizer, and the weights back to their type.
"""

import torch

from msrun.runtime import optim


def adam_weight_decay(param, m, v, lr, beta1, beta2, eps, decay, grad):
    """`ops.AdamWeightDecay`: changes param, m and v in place."""
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = m / (v.sqrt() + eps) + decay * param
    return param.sub_(update, alpha=lr)


def _update_run_kernel(opt, beta1, beta2, eps, lr, weight_decay, param, m, v, gradient, decay_flags, optim_filter):
    """Update parameters by AdamWeightDecay op."""
    success = True
    if optim_filter:
        param32 = param.to(m.dtype)
        gradient = gradient.to(m.dtype)
        if decay_flags:
            next_param = opt(param32, m, v, lr, beta1, beta2, eps, weight_decay, gradient)
        else:
            next_param = opt(param32, m, v, lr, beta1, beta2, eps, 0.0, gradient)
        param.copy_(next_param.to(param.dtype))
    return success


class AdamWeightDecayOp(optim.Optimizer):
    def __init__(self, params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0, target="device"):
        super().__init__(params, {"lr": learning_rate, "weight_decay": weight_decay}, target=target)
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.clone_param32(prefix="adam_m")
        self.clone_param32(prefix="adam_v")
        self.opt = adam_weight_decay

    @torch.no_grad()
    def step(self, closure=None):
        """`construct`"""
        loss = self.run_closure(closure)
        for group in self.param_groups:
            parameters = [param for param in group["params"] if param.grad is not None]
            moments1 = [self.state[param]["adam_m"] for param in parameters]
            moments2 = [self.state[param]["adam_v"] for param in parameters]
            for param, m, v in zip(reversed(parameters), reversed(moments1), reversed(moments2), strict=True):
                settings = (self.beta1, self.beta2, self.eps, group["lr"], group["weight_decay"])
                decay_flags, optim_filter = group["weight_decay"] != 0, param.requires_grad is not None
                _update_run_kernel(self.opt, *settings, param, m, v, param.grad, decay_flags, optim_filter)
        return loss

    def clone_param32(self, prefix):
        for group in self.param_groups:
            for old_param in group["params"]:
                wide = torch.promote_types(old_param.dtype, torch.float32)
                self.state[old_param][prefix] = torch.zeros_like(old_param, dtype=wide)
