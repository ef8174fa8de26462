"""The style of the page: one colour per placement, light and dark."""

STYLE = """
:root { --ink:#1c2430; --soft:#5c6878; --line:#dfe4ea; --paper:#f5f7f9; --card:#fff;
  --whole:#e9edf1; --whole-ink:#465262; --s0:#d4e6ff; --s0-ink:#0b4a94; --s1:#cdf0e4;
  --s1-ink:#0a5c46; --s2:#e6dcff; --s2-ink:#50309a; --s3:#fbdcec; --s3-ink:#8c2560;
  --partial:#ffe6c2; --partial-ink:#84500a; --sent:#fff3f0; --sent-ink:#b3361b; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e9ef; --soft:#97a3b3; --line:#333c48;
  --paper:#161a20; --card:#1e242c; --whole:#2c343f; --whole-ink:#b6c1ce; --s0:#17375f;
  --s0-ink:#b7d6ff; --s1:#12443a; --s1-ink:#a5ecd6; --s2:#382b63; --s2-ink:#d8c9ff; --s3:#54223e;
  --s3-ink:#ffc6e1; --partial:#523a12; --partial-ink:#ffd699; --sent:#33211d;
  --sent-ink:#ff9c85; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width:64rem; margin:0 auto; padding:2rem 1.25rem 4rem; }
h1 { margin:0; font-size:1.6rem; }
header p { margin:.25rem 0 1rem; color:var(--soft); }
h2 { font-size:1.1rem; margin:0 0 .75rem; }
h2 small { font-weight:normal; color:var(--soft); }
h3 { font-size:.95rem; margin:1.1rem 0 .35rem; }
code { font:.92em ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:1rem 1.25rem; margin:1rem 0; overflow-x:auto; }
.legend { display:flex; flex-wrap:wrap; gap:.35rem 1.25rem; list-style:none; padding:0; margin:0;
  color:var(--soft); font-size:.87rem; }
.missing { color:var(--partial-ink); background:var(--partial); border-radius:8px;
  padding:.6rem .9rem; }
.cards { display:flex; flex-wrap:wrap; gap:.75rem; }
.card { border:1px solid var(--line); border-radius:8px; padding:.6rem .9rem; min-width:9rem;
  display:flex; flex-direction:column; }
.card b { color:var(--soft); font-weight:600; }
.card strong { font-size:1.25rem; }
.card span { color:var(--soft); font-size:.85rem; }
.chip { display:inline-block; border-radius:5px; padding:0 .45em; margin:1px 4px 1px 0;
  font:600 .82rem/1.55 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space:nowrap; }
.chip i { font-style:normal; font-weight:400; opacity:.75; }
.whole { background:var(--whole); color:var(--whole-ink); }
.s0 { background:var(--s0); color:var(--s0-ink); }
.s1 { background:var(--s1); color:var(--s1-ink); }
.s2 { background:var(--s2); color:var(--s2-ink); }
.s3 { background:var(--s3); color:var(--s3-ink); }
.partial { background:var(--partial); color:var(--partial-ink); }
.link { color:var(--sent-ink); font-weight:700; white-space:nowrap; }
.module { border-left:2px solid var(--line); padding-left:.8rem; margin:.45rem 0; }
.module > summary { cursor:pointer; display:flex; align-items:center; gap:.6rem; }
.module > summary > code { font-weight:700; }
.module > summary::before { content:"\\25B8"; color:var(--soft); font-size:.8em; }
.module[open] > summary::before { content:"\\25BE"; }
summary::-webkit-details-marker { display:none; }
summary { list-style:none; }
.kind, .note, .facts, .why { color:var(--soft); font-size:.87rem; }
.badges { margin-left:auto; }
table { border-collapse:collapse; width:100%; font-size:.9rem; }
td, th { text-align:left; padding:.18rem .8rem .18rem 0; vertical-align:top; }
th { color:var(--soft); font-weight:600; border-bottom:1px solid var(--line); }
.values td:nth-child(1) { width:30%; }
.values td:nth-child(2) { width:20%; color:var(--soft); }
.values td:nth-child(3) { width:26%; }
.result td, .inner td { color:var(--soft); }
.number { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
.sent { display:flex; gap:.6rem; background:var(--sent); border-radius:7px; padding:.3rem .7rem;
  margin:.3rem 0; font-size:.9rem; }
.inner > summary { cursor:pointer; color:var(--soft); font-size:.85rem; margin:.2rem 0; }
.inner > summary::before { content:"+ "; }
.inner[open] > summary::before { content:"\\2212 "; }
.choice td:nth-child(1) { width:38%; }
.choice .bar { width:34%; padding-left:.6rem; }
.bar span { display:block; height:.7rem; margin-top:.35rem; border-radius:4px;
  background:var(--s0-ink); opacity:.45; min-width:2px; }
.chosen td { font-weight:700; }
.chosen .bar span { background:var(--s1-ink); opacity:.9; }
"""
