"""The style sheet of ``report.html``. Pure."""

STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1d2329;--soft:#5d6873;--line:#e2e5e8;--good:#2f7fc1;--late:#e0912f;
--failed:#cc3b3b;--up:#1d7f4f;--down:#c0392b;--s:#eef0f2;--c:#e9f3ec;--r0:#7a4fb5;--r1:#12877f;--r2:#a8641a;
--r3:#b3437d;--v0:#c9cfd6;--v1:#9fc7e8;--v2:#6fb0a4;--v3:#e3bd62;--v4:#dd8f71;--v5:#b48fd0;--lane:#1d2329}
@media (prefers-color-scheme:dark){:root{--bg:#14181c;--card:#1b2025;--ink:#e4e8ec;--soft:#98a3ae;--line:#30373e;
--good:#58a5e3;--late:#e8a64f;--failed:#e86a6a;--up:#5cc08a;--down:#ef7d70;--s:#21272d;--c:#1b2d24;--r0:#b494e8;
--r1:#4cc4ba;--r2:#dba25e;--r3:#e684b4;--v0:#59636d;--v1:#3f79a6;--v2:#3b7d72;--v3:#96782c;--v4:#9a5a42;
--v5:#75559a;--lane:#f2f4f6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:19px;margin:0 0 12px}
h2 small{font-weight:400;font-size:13px;color:var(--soft);margin-left:8px}
.sub,.note{color:var(--soft);margin:4px 0 12px}
.note{font-size:13px;margin:8px 0 0}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:18px 0}
.checks{list-style:none;display:flex;flex-wrap:wrap;gap:8px;padding:0;margin:16px 0 0}
.checks li{border:1px solid var(--line);border-radius:999px;padding:3px 12px;font-size:13px;background:var(--card)}
.checks li::before{margin-right:6px;font-weight:700}
.checks li.ok::before{content:"✓";color:var(--up)}
.checks li.no::before{content:"✗";color:var(--down)}
.checks li.no{border-color:var(--down)}
.checks i{color:var(--soft);font-style:normal;margin-left:4px}
.checks b{font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:14px;margin:20px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 18px;display:flex;
flex-direction:column}
.tile span,.tile em{font-size:13px;color:var(--soft);font-style:normal}
.tile strong{font-size:25px;line-height:1.35;letter-spacing:-.01em;white-space:nowrap}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th{font-weight:600;color:var(--soft);text-align:right;padding:4px 7px;border-bottom:1px solid var(--line);
white-space:nowrap}
td{text-align:right;padding:5px 7px;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}
tbody tr:last-child td{border-bottom:0}
.facts td{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere}
.facts td:first-child{color:var(--soft);white-space:nowrap;width:1%}
.why{display:block;white-space:normal;max-width:300px;color:var(--soft);font-size:12.5px}
.wide td:nth-child(2),.wide th:nth-child(2),.wide td:nth-child(6),.wide th:nth-child(6){text-align:left}
.up{color:var(--up)}.down{color:var(--down)}.same{color:var(--soft)}
b.static,b.collm{padding:1px 8px;border-radius:5px}
b.static{background:var(--s)}b.collm{background:var(--c)}
.key{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:13px;color:var(--soft);margin-bottom:8px}
.k{display:inline-flex;align-items:center;gap:6px}
.sw{width:11px;height:11px;border-radius:2px;display:inline-block}
.sw.good{background:var(--good)}.sw.late{background:var(--late)}.sw.failed{background:var(--failed)}
.ln{width:18px;height:0;border-top:2.5px solid;display:inline-block}
.r0b{border-color:var(--r0)}.r1b{border-color:var(--r1)}.r2b{border-color:var(--r2)}.r3b{border-color:var(--r3)}
.startb{border-color:var(--soft);border-top-style:dashed;border-top-width:1.5px}
.markb{border-color:var(--up);border-top-width:1.5px}
svg.plot{width:100%;min-width:860px;height:auto;display:block}
svg text{font-family:inherit;fill:var(--soft);font-size:11px}
svg .panel{fill:var(--ink);font-weight:600;font-size:12px}
svg .window{fill:var(--ink);font-weight:600;font-size:12px}
svg .lane{fill:var(--lane);font-size:11px;font-weight:600;pointer-events:none}
.band-s{fill:var(--s)}.band-c{fill:var(--c)}
.grid{stroke:var(--line);stroke-width:1}
.good{fill:var(--good)}.late{fill:var(--late)}.failed{fill:var(--failed)}
.dot-good{fill:var(--good);fill-opacity:.65}.dot-late{fill:var(--late)}
.slo{stroke:var(--failed);stroke-width:1.2;stroke-dasharray:5 4}
svg .slo-text{fill:var(--failed)}
.start{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.r0{stroke:var(--r0)}.r1{stroke:var(--r1)}.r2{stroke:var(--r2)}.r3{stroke:var(--r3)}
svg .r0t{fill:var(--r0)}svg .r1t{fill:var(--r1)}svg .r2t{fill:var(--r2)}svg .r3t{fill:var(--r3)}
.v0{fill:var(--v0)}.v1{fill:var(--v1)}.v2{fill:var(--v2)}.v3{fill:var(--v3)}.v4{fill:var(--v4)}.v5{fill:var(--v5)}
.local{fill-opacity:.6}
.mark-good{stroke:var(--up);stroke-width:1.4;fill:var(--up)}
.mark-bad{stroke:var(--down);stroke-width:1.4;stroke-dasharray:3 3;fill:var(--down)}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""
