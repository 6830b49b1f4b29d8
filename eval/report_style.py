"""The style sheet of report.html: colours as variables, once for light and once for dark."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #16191d; --muted: #667085; --line: #e4e7ec; --grid: #eaecf0;
  --good: #067647; --good-soft: #e7f6ee; --bad: #b42318; --bad-soft: #fdeceb;
  --note: #fff7e6; --mark: #dbe4ff;
  --s0: #3b5bdb; --s1: #e8590c; --s2: #0b8a6b; --s3: #9c36b5; --s4: #b08900; --s5: #0c8599;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #171b21; --ink: #e8eaee; --muted: #98a2b3; --line: #2a3038; --grid: #262c34;
    --good: #47cd89; --good-soft: #12271d; --bad: #f97066; --bad-soft: #2d1614;
    --note: #2a2312; --mark: #26346e;
    --s0: #8aa2ff; --s1: #ff9d5c; --s2: #43d1a7; --s3: #d991ec; --s4: #e8c547; --s5: #5cc8d8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 20px 64px; }
header { margin-bottom: 28px; }
.brand { color: var(--s0); font-weight: 600; font-size: 13px; letter-spacing: .04em; }
h1 { font-size: 32px; line-height: 1.2; letter-spacing: -.02em; margin: 4px 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; letter-spacing: -.01em; margin: 0 0 4px; }
.facts, .caption, figcaption, .words, small { color: var(--muted); }
.facts { margin: 0; font-size: 14px; }
.caption { margin: 0 0 14px; font-size: 14px; max-width: 90ch; }
.note {
  background: var(--note); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 14px; margin: 16px 0 0;
}
section, .card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
section { padding: 20px 22px; margin: 16px 0; }
section.cards {
  background: none; border: 0; padding: 0; display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(230px, 1fr));
}
.card { padding: 18px 20px; }
.card .name { font-size: 13px; color: var(--muted); }
.card .value {
  font-size: 40px; font-weight: 650; line-height: 1.15; letter-spacing: -.03em; margin-top: 4px;
  font-variant-numeric: tabular-nums;
}
.card .span { font-size: 14px; font-weight: 500; font-variant-numeric: tabular-nums; }
.card .words { font-size: 13px; margin-top: 8px; }
.card.good { background: var(--good-soft); }
.card.bad { background: var(--bad-soft); }
.card.good .value { color: var(--good); }
.card.bad .value { color: var(--bad); }
.card.good .value, .card.bad .value { font-size: 32px; line-height: 1.45; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 13px; }
th, td { padding: 8px 16px 8px 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
tr:last-child td { border-bottom: 0; }
td:first-child, small { white-space: nowrap; }
small { font-size: 12px; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.tag { font-size: 12px; font-weight: 600; border-radius: 99px; padding: 2px 10px; white-space: nowrap; }
.tag.good { color: var(--good); background: var(--good-soft); }
.tag.bad { color: var(--bad); background: var(--bad-soft); }
span.bad { color: var(--bad); }
.grid2, .grid3 { display: grid; gap: 22px 28px; }
.grid2 { grid-template-columns: repeat(auto-fill, minmax(min(430px, 100%), 1fr)); }
.grid3 { grid-template-columns: repeat(auto-fill, minmax(min(310px, 100%), 1fr)); }
.scroll + .grid2 { margin-top: 18px; }
figure { margin: 0; }
figcaption { font-size: 13px; min-height: 42px; margin-bottom: 6px; }
figcaption b { color: var(--ink); display: block; font-size: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 8px 0 14px; font-size: 13px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--muted); }
svg text.label { fill: var(--ink); font-size: 13px; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .even { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 4; opacity: .6; }
.series circle, .series rect { fill: var(--c); }
.series circle { stroke: var(--card); stroke-width: 1.5; }
.series line { stroke: var(--c); stroke-width: 2; stroke-linecap: round; opacity: .55; }
.series polyline { fill: none; stroke: var(--c); stroke-linejoin: round; }
polyline.thin { stroke-width: 1.5; opacity: .35; }
polyline.faint { stroke-width: 1; opacity: .35; }
polyline.bold { stroke-width: 2.5; }
details { border-top: 1px solid var(--line); padding: 8px 0; }
details:first-of-type { border-top: 0; }
summary { cursor: pointer; font-weight: 600; }
.prompt { color: var(--muted); margin: 8px 0; white-space: pre-wrap; }
.answer { white-space: pre-wrap; margin: 0; }
mark { background: var(--mark); color: inherit; border-radius: 4px; padding: 1px 0; }
@media print { section, .card { break-inside: avoid; } }
"""
