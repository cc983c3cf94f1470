"""Fetches real data once, where there is a network: HH-RLHF's files, GPT-2's and Pythia's weights.

    python data/download.py                              # all of HH-RLHF into out/hh-rlhf, 90 MB
    python data/download.py helpful-base harmless-base   # two of its folders
    python data/download.py --gpt2                       # GPT-2 (124M) into out/gpt2, 550 MB
    python data/download.py --gpt2 gpt2-xl               # 1.5B into out/gpt2-xl, 6.4 GB
    python data/download.py --pythia pythia-410m         # into out/pythia-410m, 0.9 GB; up to -12b

The size and SHA-256 of a file are checked before it gets its name. Where nobody told them, the
first download's are written into recorded.json beside it, and hold from then on. What a cut
connection or Ctrl-C leaves is in a hidden .part file: the same command goes on from there.

GPT-2's vocab.json and merges.txt are saved as encoder.json and vocab.bpe, the names under which
tiktoken's data_gym_to_mergeable_bpe_ranks and OpenAI know them.
"""

import hashlib
import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from tqdm import tqdm

if __name__ == "__main__":  # `python data/download.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.program import flags, outcome

HUB = "https://huggingface.co"
HH = {  # file: (bytes, sha256), as published in Anthropic/hh-rlhf
    "helpful-base/test.jsonl.gz":
        (875191, "8be3fc1a13b27901631696f2be6f184c799f1baeaf145f53ac5db24960adc37b"),
    "helpful-base/train.jsonl.gz":
        (16200131, "518a5bf288456fc9f3b7c980c54116fba0c52f274d3f4d344675d83e4058f6f4"),
    "helpful-online/test.jsonl.gz":
        (1053578, "39a475cc7e0df972902f8e3a0972726fce826ac65369bda8c671de4330c60a10"),
    "helpful-online/train.jsonl.gz":
        (20127228, "0994d18b82083f5c084ce04071b683958a724df8c7215ab1d851986642d36a2a"),
    "helpful-rejection-sampled/test.jsonl.gz":
        (1361231, "abc35dbc56015db1dae0faa484514ccbc3eee0133bfcd557fc69250619b028bb"),
    "helpful-rejection-sampled/train.jsonl.gz":
        (25697148, "0cea2d2ab2187624ec1314e8cc6fb579f0fa987b3a33e8102b7556ed4d255f64"),
    "harmless-base/test.jsonl.gz":
        (742801, "ebfaaed21162a4de120ae85366075b34425e2a6303fac59b99555002f7016f03"),
    "harmless-base/train.jsonl.gz": None,  # not known to us
}
FOLDERS = sorted({name.split("/")[0] for name in HH})
GPT2 = {"config.json": "config.json", "encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
PYTHIA = {"config.json": "config.json", "tokenizer.json": "tokenizer.json"}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")  # the first that is there; an index names files of it
GPT2_SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
PYTHIA_SIZES = tuple(f"pythia-{x}" for x in "14m 31m 70m 160m 410m 1b 1.4b 2.8b 6.9b 12b".split())
BLOCK = 1 << 16  # bytes


def beside(path):
    """The hidden file in which a download grows."""
    return path.with_name(f".{path.name}.part")


def measure(path):
    """(bytes, sha256) of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return path.stat().st_size, digest.hexdigest()


def recorded_in(path):
    """{name: (bytes, sha256)} of a recorded.json; empty if there is none."""
    try:
        return {k: (v[0], v[1]) for k, v in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, LookupError):
        raise ValueError(f"{path}: not readable; delete it to record sizes and sums anew") from None


# ---------------------------------------------------------------- one file

def connect(url, have, timeout):
    """(reply, first byte of it, bytes of the whole file or None): from byte `have` on if possible.

    HTTPError as the server says; ValueError without a connection.
    """
    headers = {"User-Agent": "nanoHH", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers),
                                       timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        return connect(url, 0, timeout)  # nothing comes after byte `have`: not this file's part
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise ValueError(f"{url}: no connection ({reason}); run the same command where there is a "
                         "network") from None
    start = have if reply.status == 206 else 0  # 200: the server sends the whole file
    if start and not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise ValueError(f"{url}: the server sent other bytes than those from {start} on")
    length = reply.headers.get("Content-Length")
    if not length and reply.headers.get("Transfer-Encoding") != "chunked":
        raise ValueError(f"{url}: the server tells no size, so that a cut would pass unnoticed")
    return reply, start, start + int(length) if length else None


def receive(url, path, timeout=30):
    """Adds to the .part file what one connection brings. Returns the bytes that the file has.

    None if the connection was cut and no size told. See `connect` for errors.
    """
    part = beside(path)
    have = part.stat().st_size if part.exists() else 0
    reply, start, size = connect(url, have, timeout)
    bar = tqdm(total=size, initial=start, desc=path.name, unit="B", unit_scale=True, leave=False,
               disable=None)
    with reply, bar, open(part, "ab" if start else "wb") as file:
        while True:
            try:
                block = reply.read(BLOCK)
            except (OSError, HTTPException):  # cut; not so an error of the disk, below
                return size
            if not block:
                return file.tell() if size is None else size
            file.write(block)
            bar.update(len(block))


def fetch(url, path, timeout=30):
    """The whole file in the .part file: connections go on where one was cut, if it brought some.

    ValueError when one brings nothing.
    """
    part = beside(path)
    while True:
        have = part.stat().st_size if part.exists() else 0
        size = receive(url, path, timeout)
        now = part.stat().st_size
        if now == size:
            return part
        if now <= have:
            raise ValueError(f"{url}: cut at byte {now} of {size or 'unknown'}; the same command "
                             "goes on from there")


def obtain(url, path, known=None, timeout=30):
    """Puts the file of `url` at `path`, or leaves it there. Returns what it did, one line.

    known: (bytes, sha256), or None to go by recorded.json. ValueError if what came is another
    file; nothing of it is kept. A file at `path` that is another one is set aside as *.wrong.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record, part = path.with_name("recorded.json"), beside(path)
    recorded = recorded_in(record)
    whose = "the published ones" if known else f"those in {record}"
    known = known or recorded.get(path.name)
    done = f"{path}: is there"
    if path.exists() and known and measure(path) != known:
        os.replace(path, path.with_name(path.name + ".wrong"))
        tqdm.write(f"{path}: size or sum are not {whose}: set aside as {path.name}.wrong")
    if not path.exists():
        if not (known and part.exists() and part.stat().st_size == known[0]):
            fetch(url, path, timeout)
        found = measure(part)
        if known and found != known:
            part.unlink()
            raise ValueError(f"{url}: {found[0]} bytes, sha256 {found[1][:12]}..., not {whose} "
                             f"({known[0]}, {known[1][:12]}...); not kept, try again")
        os.replace(part, path)
        done = f"{path}: fetched"
    if known:
        return f"{done}, size and sum are {whose}"
    recorded[path.name] = measure(path)
    beside(record).write_text(json.dumps(recorded, indent=1) + "\n")
    os.replace(beside(record), record)
    return f"{done}, its size and sum are unknown: recorded in {record}, checked from now on"


# ---------------------------------------------------------------- what there is

def hh(folders, out, base=HUB):
    """The files of HH-RLHF's folders into `out`/folder; a line is printed for each."""
    for name, known in HH.items():
        if name.split("/")[0] in folders:
            print(obtain(f"{base}/datasets/Anthropic/hh-rlhf/resolve/main/{name}", out / name,
                         known))


def model(source, files, out, base=HUB):
    """A model's files and weights into `out`; a line is printed for each. source: OWNER/NAME."""
    source = f"{base}/{source}/resolve/main"
    for ours, theirs in files.items():
        print(obtain(f"{source}/{theirs}", out / ours))
    for weights in WEIGHTS:
        try:
            print(obtain(f"{source}/{weights}", out / weights))
        except urllib.error.HTTPError as error:
            if error.code != 404 or weights == WEIGHTS[-1]:
                raise
            continue
        for part in parts_in(out / weights) if weights.endswith(".json") else ():
            print(obtain(f"{source}/{part}", out / part))
        return


def parts_in(path):
    """The files of weights that an index names. ValueError if it is none."""
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name or name.startswith(".")]
    except (ValueError, AttributeError, TypeError, LookupError):
        raise ValueError(f"{path}: no index of weights; delete it and try again") from None
    if strange or not names:
        raise ValueError(f"{path}: names {strange[0]!r}, no file beside it" if strange
                         else f"{path}: names no file")
    return names


def run(args):
    name, base = args.gpt2 or args.pythia, args.base.rstrip("/")
    out = Path(args.out or f"out/{name or 'hh-rlhf'}")
    try:
        if args.gpt2:
            model(f"openai-community/{name}", GPT2, out, base)
        elif args.pythia:
            model(f"EleutherAI/{name}", PYTHIA, out, base)
        else:
            hh(args.folders or FOLDERS, out, base)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{error.url}: the server says {error.code} ({error.reason})") from None


def main():
    parser = flags(__doc__)
    parser.add_argument("folders", nargs="*", metavar="FOLDER",
                        help=f"of HH-RLHF: {', '.join(FOLDERS)} (default: all)")
    parser.add_argument("--gpt2", nargs="?", const="gpt2", choices=GPT2_SIZES, metavar="SIZE",
                        help=f"GPT-2 in place of HH-RLHF: {', '.join(GPT2_SIZES)}")
    parser.add_argument("--pythia", choices=PYTHIA_SIZES, metavar="SIZE",
                        help=f"Pythia in place of HH-RLHF: {', '.join(PYTHIA_SIZES)}")
    parser.add_argument("--out", metavar="DIR", default="",
                        help="where to (default out/hh-rlhf, or out/SIZE)")
    parser.add_argument("--base", metavar="URL", default=HUB, help="default %(default)s")
    args = parser.parse_args()
    unknown = [f for f in args.folders if f not in FOLDERS]
    if unknown or sum(map(bool, (args.folders, args.gpt2, args.pythia))) > 1:
        parser.error(f"no folder {unknown[0]} in HH-RLHF" if unknown
                     else "one of --gpt2, --pythia, or folders of HH-RLHF")
    outcome(run, args, interrupted="the same command goes on from here")


if __name__ == "__main__":
    main()
