"""The style of a report: light and dark, on paper, and at 400 pixels."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d9dee4; --page: #fff; --card: #f6f8fa;
  --a: #0a62b5; --b: #c05a00; --c: #7a8591; --good: #1a6e3c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a0aab4; --line: #363d45; --page: #14171a; --card: #1d2125;
    --a: #6cb2f5; --b: #f0a050; --c: #8f9aa5; --good: #6fcf97; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
.verdict { border-left: 4px solid var(--c); background: var(--card); padding: .75rem 1rem; margin: .5rem 0 1rem; }
.verdict.met { border-color: var(--good); } .verdict.missed { border-color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; font-size: .85em; }
.note, figcaption { color: var(--soft); font-size: .9em; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem; }
figure { margin: .5rem 0; break-inside: avoid; } figure b { display: block; } figcaption { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; }
.m { fill: var(--soft); } .ti { fill: var(--ink); } .ta { fill: var(--a); } .tc { fill: var(--soft); }
.g { stroke: var(--line); } .fa { fill: var(--a); } .fb { fill: var(--b); } .fc { fill: var(--c); }
.la, .lc { fill: none; stroke: var(--a); stroke-width: 2.5; } .lc { stroke: var(--c); stroke-dasharray: 5 3; }
dl { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: .2rem 1rem; margin: 0; font-size: .9em; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); padding: 1rem; font-size: .75rem; max-height: 30rem; }
@media (max-width: 34rem) { table { font-size: .8rem; } th, td { padding-right: .35rem; } }
@page { size: A4; margin: 12mm; }
@media print { body { max-width: none; padding: 0; font-size: 10px; line-height: 1.35; } details { display: none; }
  .pictures { grid-template-columns: 1fr 1fr; gap: .2rem 1.5rem; } svg { height: 40mm; } h1 { font-size: 1.6em; }
  h2 { font-size: 1.2em; margin: .6rem 0 .2rem; } th, td { padding: .1rem .6rem .1rem 0; } figure { margin: .2rem 0; }
  .verdict { padding: .3rem .8rem; margin: .2rem 0 .4rem; } p { margin: .3rem 0; } }
"""
