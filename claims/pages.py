"""README.md and the pages of docs/ that are written from results/."""

from pathlib import Path

from claims import loop, records, report, robustness
from common import UserError, write_atomically


def claims_table(done):
    """One row a claim that has records: what it says, the verdict, its place in docs/claims.md."""
    lines = ["| claim | the paper says | here | seeds |", "|---|---|---|---|"]
    for name, told in done.items():
        lines.append(f"| [{name}](docs/claims.md#{name.lower()}) | {told['says']} "
                     f"({told['where']}) | **{told['verdict'].split(':')[0]}** "
                     f"| {told['seeds']} |")
    counts = {}
    for told in done.values():
        word = told["verdict"].split(":")[0]
        counts[word] = counts.get(word, 0) + 1
    summed = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
    return f"{len(done)} claims measured: {summed}.\n\n" + "\n".join(lines)


def caption(name, claim, panels):
    """What a claim's figure shows: the axes, and the paper's own figures beside them."""
    shown = "; ".join(f"{title}: {y}" + (f" against {x}" if x else "")
                      for title, x, y, *_ in panels)
    return f"{name}, {claim.says}. {shown}"


def section(name, claim, told, panels):
    """A claim's part of docs/claims.md."""
    lines = [f"## {name}", "", f"{claim.says[0].upper()}{claim.says[1:]} ({claim.where}).", "",
             f"**{told['verdict'][0].upper()}{told['verdict'][1:]}.** {told['measured']}.", ""]
    if claim.paper:
        lines += [f"The paper's figures: {claim.paper}.", ""]
    more = "" if told["seeds"] == 3 else " recorded (--seeds says how many it measures)"
    lines += [f"Held means: {claim.rule.removeprefix('held: ')}", "",
              f"`{told['command']}`, {told['seeds']} seeds{more}, about {claim.minutes} minutes "
              "on two cores" + (f" together with all of results/{claim.source}.jsonl"
                         if claim.source else "") + ".", ""]
    if (Path("docs/claims") / f"{name}.png").exists():
        lines += [f"![{caption(name, claim, panels)}](claims/{name}.png)", ""]
    return "\n".join(lines)


def claims_page(claims, done, judged):
    head = ("# The claims\n\nWritten by `python eval.py --readme` from results/. Points are means "
            "over seeds, bands and bars one standard error over seeds, as is \"±\". Rules were "
            "fixed before a claim's last run, but for two things that came when most records were "
            "in: the least sizes that matter (\"and a point\"), and *inconclusive* for what is "
            "too noisy to tell, which H04, H10, H11, H23, I01, I11 and repair became from *not "
            "held*. Where more was changed after records had been seen, the rule says so.\n\n")
    return head + "\n".join(section(name, claims[name], told, judged[name])
                            for name, told in done.items())


def hh_table():
    """The last report of runs/hh.sh that was recorded (RECORD=hh)."""
    if not records.records("hh"):
        return "Not measured yet."
    row = records.records("hh")[-1]
    groups, calibration = row["groups"], row["calibration"]
    lines = ["| held-out comparisons | accuracy | longer answer | shorter answer | pairs | ECE |",
             "|---|---|---|---|---|---|"]
    for o in ("helpful", "harmless", "all"):
        g = groups[o]
        lines.append(f"| {o} | {g['accuracy']:.1%} ± {g['se']:.1%} | {g['longer']:.1%} "
                     f"| {g['shorter']:.1%} | {g['pairs']} | {calibration[o]['ece']:.3f} |")
    return "\n".join(lines)


def fill(path, parts):
    """Replaces what stands between a file's markers, `<!-- name: begin -->` and its end."""
    text = Path(path).read_text()
    for name, body in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise UserError(f"{path}: needs the markers {begin} and {end}, once, in this order")
        text = f"{text.partition(begin)[0]}{begin}\n{body}\n{end}{text.partition(end)[2]}"
    write(path, text)


def write(path, text):
    write_atomically(path, lambda f: f.write(text.encode()))


def rewrite(claims, done):
    """README.md's tables, docs/claims.md with its figures, docs/online.md, docs/robustness.md."""
    rows = records.records("laptop")
    if not rows:
        raise UserError("results/laptop.jsonl: no record; "
                        "run `python eval.py --report --record --run out/laptop` first")
    fill("README.md", {
        "laptop": f"Means of {len(rows)} seeds, ± standard error over seeds; "
                  f"{int(rows[0]['prompts'])} held-out prompts of each kind a seed.\n\n"
                  f"{report.as_markdown(report.over_seeds(rows))}",
        "claims": claims_table(done), "hh": hh_table(),
        "loop": loop.loop_table(records.records("loop"))})
    judged = {name: claims[name].judge(claims[name].rows(name)) for name in done}
    for name, found in judged.items():
        records.draw_curves(name, found.panels, found.log_x)
    write("docs/claims.md", claims_page(claims, done, {n: v.panels for n, v in judged.items()}))
    if records.records("online"):
        fill("docs/online.md", {"regimes": loop.regimes_table(records.records("online")),
                                "repair": loop.repair_table(records.records("repair"))})
    if records.records("robustness"):
        write("docs/robustness.md", robustness.table(records.records("robustness")))
    print(f"README.md, docs/: tables of {len(done)} claims and their figures, from results/")
