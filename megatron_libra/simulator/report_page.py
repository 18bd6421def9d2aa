"""The page of the report. In: named parts. Out: HTML; `$name` marks where a part goes."""

from __future__ import annotations

from string import Template

__all__ = ["PAGE"]

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #f5f7fa; margin: 0; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 34px 0 10px; }
p { margin: 6px 0; }
.muted { color: #52606d; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.cards div, figure, pre { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px;
  padding: 12px 14px; }
.cards div { flex: 1 1 150px; }
.cards b { display: block; font-size: 20px; color: #0f766e; white-space: nowrap; }
.cards span { color: #52606d; font-size: 13px; }
figure { margin: 14px 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: #52606d; font-size: 13px; margin-top: 6px; }
pre { overflow-x: auto; font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; font-size: 13px; white-space: nowrap; }
th, td { text-align: right; padding: 3px 9px; border-bottom: 1px solid #e4e7eb; }
th { position: sticky; top: 0; background: #e4e7eb; cursor: help; }
tr.best td { background: #d8f3ee; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; font-size: 13px; }
dt { font-weight: 600; }
dd { margin: 0; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="muted">$subtitle</p>
<div class="cards">$cards</div>
<h2>Why this configuration</h2>
<ul>$reasons</ul>
<p class="muted">$sampling</p>
<p class="muted">$model</p>
<h2>Pictures</h2>
$figures
<h2>Finalists, after the references</h2>
<p class="muted">Speedups are over $reference on the same steps; the meaning of a heading is below,
or under the mouse.</p>
<div class="scroll">$finalists</div>
<details><summary>All candidates, on the screened steps</summary>
<div class="scroll">$screened</div></details>
<details><summary>What the columns mean</summary><dl>$meanings</dl></details>
<h2>Run file</h2>
<p class="muted">Save it and add <code>--config FILE</code> to <code>megatron_libra.run</code>.
Flags on the command line win over it.</p>
<pre>$run_file</pre>
</main>
</body>
</html>
""")
