import tiny as T, json
def test_try(tiny, nursery):
    for s in ("base",)+T.STAGES:
        tiny.whole(s)
        r=tiny.report(s)
        print(s, round(tiny.seconds[s],2), r["cpu"], r["events"], len(r["sums"]), len(r["drawn"]), r["calls"])
        print(sorted(p.name for p in (tiny.root/s).iterdir()))
    d=nursery.run(tiny.command("ppo", tiny.root/"ppo")); print(d)
    print(sorted(p.stat().st_size for p in (tiny.root/"ppo").iterdir()))
