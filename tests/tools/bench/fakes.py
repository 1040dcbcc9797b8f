"""Backwards that misbehave, with the arguments of dash_attn.backward."""

from __future__ import annotations

import os
import signal
import time

import torch

import dash_attn

_calls = 0


def right(dout, q, k, v, out, lse, **how):
    return dash_attn.backward(dout, q, k, v, out, lse, **how)


def differs(dout, q, k, v, out, lse, **how):
    """Every third call dK is one bit off at one place, and dV at another."""
    global _calls
    _calls += 1
    grads = [x.clone() for x in dash_attn.backward(dout, q, k, v, out, lse, **how)]
    if _calls % 3 == 0:
        for x, at in ((grads[1], (0, 3, 0, 5)), (grads[2], (0, 7, 0, 1))):
            x[at] = torch.nextafter(x[at], torch.tensor(torch.inf))
    return grads


def nans(dout, q, k, v, out, lse, **how):
    """Every third call one element of dQ is not a number."""
    global _calls
    _calls += 1
    grads = [x.clone() for x in dash_attn.backward(dout, q, k, v, out, lse, **how)]
    if _calls % 3 == 0:
        grads[0][0, 2, 0, 1] = torch.nan
    return grads


def sociable(dout, q, k, v, out, lse, **how):
    """In a batch, and in a pack of several, dQ is one bit off at every place."""
    dq, dk, dv = dash_attn.backward(dout, q, k, v, out, lse, **how)
    if len(q) > 1 or len(how.get("cu_seqlens_q", ())) > 2:
        dq = torch.nextafter(dq, torch.full_like(dq, torch.inf))
    return dq, dk, dv


def hangs(dout, q, k, v, **how):
    """The third call never returns."""
    global _calls
    _calls += 1
    if _calls == 3:
        time.sleep(3600)
    return q.clone(), k.clone(), v.clone()


def dies(dout, q, k, v, **how):
    """The third call takes its process along."""
    global _calls
    _calls += 1
    if _calls == 3:
        os._exit(11)
    return q.clone(), k.clone(), v.clone()


def copies(dout, q, k, v, **how):
    return q.clone(), k.clone(), v.clone()


def stopped(dout, q, k, v, **how):
    """During the third call the time of the whole job is over."""
    global _calls
    _calls += 1
    if _calls == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return q.clone(), k.clone(), v.clone()


def absent(*_, **__):
    raise NotImplementedError("not for this machine")
