"""What people met on several processes (faults by number), and what a process then holds.

Where the cases are: a mean over tokens, 7/4: test_common, test_ranks, here sharded. Gradient 4.0 of
inputs [1, 3] and [5, 7]: test_ranks, here sharded. 5 items on 2 ranks: here; a rank without rows:
test_ranks, test_parallel. Rank 0 alone samples, evaluates and saves: test_ranks, counted
collectives. Seeds: test_common, test_ranks. 64 items stopped after 5 batches of an epoch, 5 + 5
steps equal 10, code in a pickle, bf16's lost steps: test_common. A bad gradient of one rank:
test_parallel. A full disk: test_common, of two ranks here.

Proved alive by: weights shared with the file they come from, drawn first, frozen, of a fresh head
not 0, an untied head lost; a file read into memory; gradients not summed; the whole copy kept,
embeddings not cut; a softmax in bf16; a dummy pass of weight 1; a full disk's traceback; --shard
not passed on to PPO.
"""

import json
import math
import time

import pytest
import torch
from test_model import identity
from test_ranks import close
from tiny import PATIENCE, checkpoint

import constitution
import model as model_file
import online
from common import load_checkpoint, save_checkpoint
from data import hf
from data.tokenizer import train_bpe
from model import GPT, GPTConfig, pack, unpack

# ---------------------------------------------------------------- numbers by hand

SUMS = """
import json, torch
from common import start, total, update
from parallel import Team, even, full, passes
rank, world, device = start("cpu")

def gradient(micros, count):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model.h, model.checkpoint = torch.nn.ModuleList(), False
    team, summed = Team(model, True, device), 0.0
    for x, weight in passes(even(micros, 2, [9.0]), team):
        loss = weight * team(lambda model: (model.weight * torch.tensor(x)).sum())
        (loss / count).backward()
        summed += loss.item()
    norm = update(model, torch.optim.SGD(model.parameters(), lr=1.0), 1.0, max_norm=1e9)
    return 1 - full(model.weight).item(), norm, total(summed) / count

uneven = [[[4.0]], [[1.0, 1.0, 1.0]]][rank]
inputs = [[[1.0], [3.0]], [[5.0], [7.0]]][rank]
empty = [[[2.0]], []][rank]
print(json.dumps([gradient(*x) for x in ((uneven, 4), (inputs, 4), (empty, 1))]))
"""


def test_sharded_sums_by_hand(nursery):
    """Gradient, its norm, and the loss: 7/4; 4 (3 and 5 if never summed); the other rank's."""
    for done in nursery.ranks(2, ["-c", SUMS]):
        assert done.code == 0, done.err
        assert json.loads(done.out) == [[1.75] * 3, [4.0] * 3, [2.0] * 3]


def test_five_items_on_two_ranks(tiny, nursery, tmp_path):
    """Batches of one: each rank takes 5 steps, one of them on a row; ends within a minute."""
    flags, begin = dict(documents=5, batch=1, steps=5, every=1), time.monotonic()
    assert nursery.run(tiny.command("pretrain", tmp_path / "one", **flags)).code == 0
    ranks = nursery.ranks(2, tiny.command("pretrain", tmp_path / "two", **flags), [("spy", 0)])
    assert time.monotonic() - begin < 60 * PATIENCE
    first, second = (done.report for done in ranks)
    assert first["calls"] == second["calls"] and first["sums"] == second["sums"]
    assert len(set(first["sums"])) == 6
    close(tmp_path / "one", tmp_path / "two")


def test_a_probability_that_bf16_rounds_to_1(monkeypatch):
    """Logits 6.5 and 0, p = .9985: log-prob -0.0015; a softmax in bf16 says 0."""
    monkeypatch.setitem(model_file.AUTOCAST, "cpu", torch.bfloat16)
    network = identity(2, torch.tensor([[[6.5, 0.0], [0.0, 0.0]]]))
    ids, mask = torch.tensor([[1, 0]]), torch.tensor([[False, True]])
    found = network.logprobs(ids, mask)[0, 1].item()
    assert found == pytest.approx(-math.log1p(math.exp(-6.5)), abs=1e-7)
    assert f"{found:.4f}" == "-0.0015"
    assert torch.tensor([6.5, 0.0], dtype=torch.bfloat16).log_softmax(0)[0] == 0


def test_a_full_disk_ends_all_ranks(tiny, nursery, tmp_path):
    """Rank 0 can't write: the others, which wait for it an hour at most, end with it."""
    jobs = nursery.start_ranks(2, tiny.command("pretrain", tmp_path / "run"),
                               [("file_limit", 2 ** 16)])
    first, second = (job.wait(60) for job in jobs)
    assert first.code == second.code == 1 and "Traceback" not in first.err + second.err
    assert "ckpt.pt: not written" in first.last and "rank 0" in second.last


@pytest.mark.parametrize("shard", [True, False])
def test_loops_pass_shard_on(monkeypatch, tmp_path, shard):
    """To each stage that trains: the PM and the policy of a round."""
    seen, lots = [], {"base": [dict(prompt=[])] * 10}
    for stage in (online.preference, online.ppo):
        monkeypatch.setattr(stage, "train", seen.append)
    cfg = online.Config(shard=shard, out=str(tmp_path))
    online.train_pm(cfg, "1", lots, rank=1)
    online.train_policy(cfg, 1, "pm")
    seen.append(constitution.rl_config(constitution.Config(shard=shard), "policy", "pm"))
    assert [x.shard for x in seen] == [shard] * 3


# ---------------------------------------------------------------- what a process holds

HELD = """
import gc, json, torch
from common import adamw, start, update
from model import GPT, GPTConfig
from parallel import Team
from pretrain import lm_loss

def held():
    gc.collect()
    kept = [x.untyped_storage() for x in gc.get_objects()
            if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta"]
    return sum({x._cdata: x.nbytes() for x in kept}.values())

rank, world, device = start("cpu")
before, model = held(), GPT(GPTConfig(256, 64, 2, 4, 64))
number = sum(p.numel() for p in model.parameters())
team = Team(model, True, device)
optimizer, found = adamw(model, 1e-3), [held() - before]
ids, lengths = torch.ones(2, 32, dtype=torch.long), torch.tensor([32, 20])
for step in range(2):
    team(lm_loss, ids, lengths).backward()
    grads = [p.grad for p in model.parameters()]
    found.append(held() - before)
    del grads
    update(model, optimizer, 1e-3)
for step in range(20 if world == 4 else 3):
    with team.whole() as whole, torch.no_grad():
        lm_loss(whole, ids, lengths)
        found.append(held() - before)
    del whole
state = team.state(optimizer)
del state
found.append(held() - before)
print(json.dumps([x / number for x in found]))
"""


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rank_holds_its_share(nursery, world):
    """Bytes a parameter: 4 of weights, 4 of gradients, 8 of moments, over the ranks; 4 more while
    the model is whole, and 20 times of that leave nothing.
    """
    for done in nursery.ranks(world, ["-c", HELD]):
        assert done.code == 0, done.err
        first, with_gradients, step, *wholes, last = json.loads(done.out)
        assert first == pytest.approx(4 / world, rel=0.01)
        assert with_gradients == pytest.approx(8 / world, rel=0.01)
        assert step == pytest.approx(16 / world, rel=0.01)
        assert wholes == pytest.approx([12 / world + 4] * len(wholes), rel=0.01)
        assert last == pytest.approx(12 / world, rel=0.01)


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, freed or not."""

    def __init__(self):
        super().__init__()
        self.bytes, self.seen = 0, set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if torch.is_tensor(x)}
        out = f(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if torch.is_tensor(x) and x.device.type != "meta":
                new = x.untyped_storage()._cdata not in given
                self.bytes += x.untyped_storage().nbytes() if new else 0
        return out


def anonymous():
    """Bytes of memory that are this process's own, not a file's."""
    with open("/proc/self/status") as file:
        return next(int(x.split()[1]) * 1024 for x in file if x.startswith("RssAnon"))


FORMS = [dict(), dict(scalar=True), dict(rotary=0.25, parallel=True, tied=False, exact_gelu=True)]


@pytest.fixture(scope="module")
def tok():
    return train_bpe(["the otter lives in the river"], 270)


@pytest.mark.parametrize("form", FORMS)
def test_loading_takes_the_memory_of_the_weights(tmp_path, tok, form):
    """40 MB: a file that is read takes nothing; the model its weights, at no time 1.1 times that.

    Equal to what was saved, and trained as before: nothing else refers to them.
    """
    old = GPT(GPTConfig(tok.vocab, 64, 3, 4, 512, **form)).reset(3)
    size = 4 * sum(p.numel() for p in old.parameters())
    save_checkpoint(tmp_path / "ckpt.pt", **pack(old, tok))
    with Made():                                        # what its first use imports
        unpack(pack(GPT(GPTConfig(64, 8, 1, 1, 8)), tok))
    before = anonymous()
    content = load_checkpoint(tmp_path)
    assert anonymous() - before < 0.1 * size
    with Made() as made:
        new = unpack(content)
    assert made.bytes == size and anonymous() - before < 1.1 * size
    assert all(p.requires_grad and p.is_leaf and p.is_contiguous() for p in new.parameters())
    assert {k: x.shape for k, x in new.named_buffers()} == {}
    state = new.state_dict()
    assert state.keys() == old.state_dict().keys() and all(
        torch.equal(x, state[k]) for k, x in old.state_dict().items())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(new(ids), old(ids))
    other = unpack(content)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(1.0)
    assert all(torch.equal(p, content["model"][k]) for k, p in other.named_parameters())
    assert not {p.data_ptr() for p in other.parameters()} & {
        x.data_ptr() for x in content["model"].values()}


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]])
def test_a_folder_takes_the_memory_of_the_weights(tmp_path, tok, form):
    """From a Hugging Face folder: the weights are held once, none is a view of what is larger. What
    malloc keeps of the copies on the way, two of a tensor at a time, is not as much again.
    """
    old = GPT(GPTConfig(tok.vocab, 64, 3, 4, 512, **form)).reset(3)
    size = 4 * sum(p.numel() for p in old.parameters())
    hf.save(tmp_path / "folder", pack(old, tok)["gpt"], old.state_dict(), tok)
    hf.load(tmp_path / "folder", tok)                   # what its first use imports
    before = anonymous()
    gpt, state, _ = hf.load(tmp_path / "folder", tok)
    assert anonymous() - before < 1.6 * size
    new = unpack(dict(gpt=gpt, model=state))
    assert {k: x.untyped_storage().nbytes() for k, x in state.items()} == {
        k: 4 * x.numel() for k, x in new.state_dict().items()}
    assert all(torch.equal(p, old.get_parameter(k)[:tok.vocab] if p.ndim > 1 and k in hf.TABLES
                           else old.get_parameter(k)) or k in hf.TABLES
               for k, p in new.named_parameters())


def test_a_fresh_head_is_made_and_the_other_left_out(tok):
    """The only weights that no file has, at 0 and trained."""
    plain = GPT(GPTConfig(tok.vocab, 64, 1, 2, 32, **FORMS[2]))
    scored = unpack(pack(plain, tok), scalar=True)
    assert not scored.score_head.weight.any() and scored.score_head.bias.requires_grad
    assert {p.device.type for p in scored.parameters()} == {"cpu"}
    assert not hasattr(scored, "lm_head")


def test_a_run_in_place_of_a_file_that_is_read_changes_nothing(tmp_path, tok):
    """A checkpoint is replaced while an older one is in use: its tensors are those of before."""
    model = GPT(GPTConfig(tok.vocab, 64, 1, 2, 32))
    save_checkpoint(tmp_path / "ckpt.pt", **pack(model, tok))
    content = load_checkpoint(tmp_path)
    save_checkpoint(tmp_path / "ckpt.pt", **pack(GPT(model.config).reset(9), tok))
    assert all(torch.equal(x, content["model"][k]) for k, x in model.state_dict().items())
    assert not torch.equal(checkpoint(tmp_path)["model"]["wte.weight"], model.wte.weight)
