"""One model, trained by all of torchrun's processes with torch's own data parallelism or sharding.

    gradient of a step = sum over ranks and micro-batches of that of each loss

A loss comes divided by the count over ALL of them, so nothing depends on how a step's rows are cut.

DistributedDataParallel: each rank has all weights; while the backward pass of a step's last
micro-batch runs, gradients that are ready are summed already. fully_shard, for what does not fit:
each rank has 1 / ranks of weights, gradients and optimizer state (16 bytes a parameter in all), and
collects a block's weights where it computes that block. Both take a module's forward pass, so a
loss is called inside one: team(f, ...) is f(model, ...). Ranks must do equally many passes.
Weights are kept and collected in float32, so that a step is that of one process. Where products are
in bf16 (CUDA), the backward pass needs the matrices again in it, and keeps 2 bytes a parameter of
all blocks, sharded or not; --checkpoint keeps those of one block at a time.

Sampling and evaluation take no gradients, and ranks do as many passes there as they have rows. So
they get the weights whole: `with team.whole() as model`, 4 bytes a parameter for that time.
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn

from common import ALONE, UserError, groups, meet, mine
from model import pack


class Inside(nn.Module):
    """forward(f) is f(model): the loss, or a tuple that begins with it."""

    def __init__(self, model, world):
        super().__init__()
        self.model, self.world = model, world

    def forward(self, f):
        out = f(self.model)
        loss = out[0] if isinstance(out, tuple) else out
        if loss.requires_grad:       # torch takes the mean over ranks
            loss.register_hook(lambda grad: grad * self.world)
        return out


def home(device, shard):
    """Where a model is before it joins a Team: what is cut may be larger than a device."""
    return torch.device("cpu") if shard and dist.is_initialized() else device


class Team:
    """The processes that train `model`, alike on all of them. Optimizers are made after it.

    shard: weights are cut over them, on `device`.
    """

    def __init__(self, model, shard=False, device=None):
        self.model = model
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.net, self.cut = Inside(model, self.world), shard and self.world > 1
        meet(ALONE, ALONE)           # each has read its data at a speed of its own
        if self.cut:
            gpus = (device or model.device).type == "cuda"   # there `home` was the wrong device
            if (model.checkpoint or gpus) and model.h[0]._compiled_call_impl:
                raise UserError("--shard and --compile: not on GPUs, and not with --checkpoint; "
                                "leave --compile out")
            self.empty = without_weights(model)
            self.net.world = sharded(self.net, device or model.device)
        elif self.world > 1:
            self.net = nn.parallel.DistributedDataParallel(
                self.net, process_group=groups()["gradients"], gradient_as_bucket_view=True)
            # torch lays its buckets out anew after the first backward pass. Were that a real one, a
            # resumed run would sum one step's gradients in another order than an unbroken run.
            self(lambda model: 0 * sum(p.sum() for p in model.parameters())).backward()
            self.net.zero_grad(set_to_none=True)

    def __call__(self, f, *args):
        return self.net(lambda model: f(model, *args))

    def held(self):
        """Within it, gradients stay on their rank. Sharded ones never do: they would be whole."""
        apart = self.world > 1 and not self.cut
        return self.net.no_sync() if apart else contextlib.nullcontext()

    @contextlib.contextmanager
    def whole(self):
        """The model with all weights on every rank, which may then do as many passes as it likes;
        the others wait at the end. All ranks must call it. Sharded: a copy for reading.
        """
        if self.cut:
            meet()
            whole = {k: full(x) for k, x in self.model.state_dict().items()}
            self.empty.load_state_dict(whole, assign=True)
        yield self.empty.eval() if self.cut else self.model
        if self.cut:
            self.empty.to("meta")
        meet(ALONE)

    def state(self, *optimizers):
        """What a checkpoint says, for any number of ranks: weights, states of optimizers. All ranks
        must call it; sharded, only rank 0 gets the tensors.
        """
        kept = [self.model.state_dict(), *(x.state_dict() for x in optimizers)]
        return deep(kept, lambda x: full(x, "cpu")) if self.cut else kept

    def content(self, tok, optimizer=None):
        """A checkpoint of a stage that trains one model, or has trained it."""
        weights, *moments = self.state(*filter(None, [optimizer]))
        return {**pack(self.model, tok), "model": weights, **dict(zip(["optimizer"], moments))}

    def load(self, optimizer, state):
        """An optimizer's state of a checkpoint that any number of ranks wrote; None is fresh."""
        if not state:
            return
        if self.cut:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            state = dict(state, state={i: {k: like(x, params[i]) for k, x in one.items()}
                                       for i, one in state["state"].items()})
        optimizer.load_state_dict(state)


# ---------------------------------------------------------------- a step's passes

def portions(rows, micro, size=len):
    """This rank's micro-batches of the rows of all ranks, like sizes together: [(rows, weight)].

    As many on each rank: one with fewer ends with the first row, whose loss has weight 0.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own, most = sorted(mine(rows, rank, world), key=size), len(mine(rows, 0, world))
    return even([own[i:i + micro] for i in range(0, len(own), micro)], -(-most // micro), rows[:1])


def even(parts, number, spare):
    """`number` parts with weights: the given ones, 1, then `spare`, 0."""
    return [(part, 1.0) for part in parts] + [(spare, 0.0)] * (number - len(parts))


def passes(parts, *teams, end=True):
    """The parts in turn. The teams' gradients are summed over ranks in the backward pass of the
    last, or with end=False later.
    """
    for i, part in enumerate(parts):
        last = end and i + 1 == len(parts)
        if last:
            meet()
        with contextlib.ExitStack() as stack:
            for team in () if last else teams:
                stack.enter_context(team.held())
            yield part


# ---------------------------------------------------------------- sharding

def without_weights(model):
    """A copy whose weights take no memory."""
    return copy.deepcopy(model, {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False)
                                 for p in model.parameters()})


def sharded(net, device):
    """Cuts the weights of an Inside over all ranks, block by block, then the rest. Returns what to
    multiply a gradient by for its sum over ranks: torch takes the mean, but 2.7's gloo the sum.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    mesh = DeviceMesh.from_group(groups()["gradients"], device.type)
    for block in net.model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    probe = fully_shard(nn.Linear(1, 1, False, device), mesh=mesh)  # a gradient of 1 on each rank
    probe(torch.ones(1, 1, device=device)).sum().backward()
    return net.world / full(probe.weight.grad).item()


def full(x, place=None):
    """A sharded tensor whole; with a place, there on rank 0 and None elsewhere. Others as it is."""
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    if place is None or not torch.is_tensor(whole):
        return whole
    return whole.to(place) if dist.get_rank() == 0 else None


def like(x, param):
    """A whole tensor cut as `param` is, if it has its shape."""
    if not torch.is_tensor(x) or x.shape != param.shape:
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x.to(param.device), param.device_mesh, param.placements)


def deep(x, f):
    """Containers with f(x) in place of each x that is none."""
    if isinstance(x, dict):
        return {k: deep(v, f) for k, v in x.items()}
    return [deep(v, f) for v in x] if isinstance(x, list) else f(x)
