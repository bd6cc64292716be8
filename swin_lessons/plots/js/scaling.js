// Several GPUs: a step's bytes, the network's time, what of it hides, and the efficiency. As training/scaling.py.
function build(data, ui) {
  const fields = [], start = data.start, short = (x) => Number(x.toPrecision(3)).toLocaleString("en");
  const ms = (seconds) => `${short(1000 * seconds)} ms`;
  const model = ui.choice("Model", [...data.models.map((m) => m.name), "my own"], () => { fill(); ui.draw(); });
  const links = ui.choice("Links", [...data.links.map((l) => l.name), "my own"], () => { fill(); ui.draw(); });
  const method = ui.choice("Method", ["DDP", "FSDP2"]);
  const sent = ui.choice("Numbers travel in", ["4 bytes (fp32)", "2 bytes (fp16, bf16)"]);
  const again = ui.button("Start again", () => {
    reset();
    fields.forEach((field) => field.set(field.start));
    ui.draw();
  });
  const bar = again.parentNode, selects = [...bar.querySelectorAll("select")];
  const reset = () => selects.forEach((select, i) => { select.selectedIndex = i === 1 ? start.links : 0; });
  reset();

  // The numbers that belong to what is chosen.
  function fill() {
    const chosen = data.models[model.index], pair = data.links[links.index];
    if (chosen) params.set(chosen.params / 1e6);
    if (pair) { within.set(pair.within); between.set(pair.between); }
  }

  // A number of the reader's; one that cannot be is marked, and the last good one counts. `choice`: becomes "my own".
  function number(name, first, { least = 1e-6, most = 1e9, step = "any", choice = null } = {}) {
    const input = make("input", { type: "number", min: least, max: most, step, style: "width: 7.5em" });
    input.id = `${again.closest("figure").id}-number-${fields.length}`;
    const field = { name, start: first };
    const read = () => {
      const value = input.value.trim() === "" ? NaN : Number(input.value);
      field.good = value >= least && value <= most && (step === "any" || Number.isInteger(value));
      if (field.good) field.value = value;
      input.setAttribute("aria-invalid", String(!field.good));
      input.style.outline = field.good ? "" : `2px solid ${RED}`;
    };
    field.set = (value) => { input.value = value; read(); };
    input.addEventListener("input", () => {
      read();
      if (choice) choice.selectedIndex = choice.length - 1;
      ui.draw();
    });
    input.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab would take the keys
    const label = make("label", { for: input.id }, name);
    bar.insertBefore(make("span", { style: "display: flex; gap: 0.5em; align-items: center" }, label, input), again);
    fields.push(field);
    field.set(first);
    return field;
  }
  const whole = { least: 1, most: 1e6, step: 1 };
  const params = number("Parameters (millions)", data.models[0].params / 1e6, { choice: selects[0] });
  const images = number("Images a GPU and pass", start.images, whole);
  const pass = number("A pass on one GPU (ms)", start.milliseconds);
  const passes = number("Passes a step", 1, whole);
  const gpus = number("GPUs a node", start.gpus, whole);
  const nodes = number("Nodes", start.nodes, whole);
  const within = number("Within a node (GB/s a GPU)", data.links[start.links].within, { choice: selects[1] });
  const between = number("Between nodes (GB/s a node)", data.links[start.links].between, { choice: selects[1] });
  const overlap = number("Overlap (% of a pass)", start.overlap, { least: 0, most: 100 });

  const time = ui.board("A step, from left to right", 6, 24, null, 336);
  const out = make("table", { style: "border-collapse: collapse; align-self: center" });
  time.canvas.parentNode.parentNode.append(out);
  const counts = [1, 2, 4, 8, 16, 32, 64];
  const bars = ui.bars("Efficiency with more nodes", counts.map((n) => many(n, "node")));

  function stepOn(count) {
    const ddp = method.index === 0, devices = count * gpus.value;
    const part = ((devices - 1) / devices) * params.value * 1e6 * [4, 2][sent.index]; // one all-gather
    const bytes = (ddp ? 2 : 2 * passes.value + 1) * part;
    const speed = 1e9 * (count > 1 ? Math.min(within.value, between.value) : within.value);
    const compute = (passes.value * pass.value) / 1000;
    const hidden = ((overlap.value / 100) * compute) / (ddp ? passes.value : 1);
    const communication = bytes / speed, exposed = Math.max(0, communication - hidden), total = compute + exposed;
    const state = (16 * params.value * 1e6) / (ddp ? 1 : devices);
    return { devices, bytes, communication, exposed, compute, total, state,
      efficiency: compute / total, images: (devices * passes.value * images.value) / total };
  }

  function draw(now) {
    const wide = 23 / now.total, hidden = now.communication - now.exposed, x = 0.5;
    time.clear();
    time.text(0.2, 3.9, "the GPU computes", BLACK, 0.9);
    time.canvas.setAttribute("aria-label", `The GPU computes for ${ms(now.compute)} and waits for ${ms(now.exposed)}`);
    time.fill(1.3, x, BLUE, 1.4, now.compute * wide);
    time.text(3.1, 3.9, "the network sends", BLACK, 0.9);
    time.fill(4.2, x + (now.compute - hidden) * wide, SKY, 1.4, hidden * wide);
    time.fill(4.2, x + now.compute * wide, ORANGE, 1.4, now.exposed * wide);
  }

  function list(rows) {
    const line = ([name, value]) => make("tr", {},
      make("th", { scope: "row", style: "text-align: left; font-weight: normal" }, name),
      make("td", { style: "text-align: right; padding-left: 1em; white-space: nowrap" }, value));
    const title = make("caption", { style: "text-align: left; caption-side: top; color: inherit" }, "In numbers");
    out.replaceChildren(title, ...rows.map(line));
  }

  return () => {
    const now = stepOn(nodes.value), share = `${(100 * now.efficiency).toFixed(1)} %`;
    draw(now);
    list([
      ["A GPU sends in a step", `${short(now.bytes / 1e9)} GB`],
      ["The network needs", ms(now.communication)],
      ["of that the GPU waits for", ms(now.exposed)],
      ["A step takes", ms(now.total)],
      ["Images a second, all GPUs", short(now.images)],
      ["Efficiency", share],
      ["Weights, gradients, AdamW on a GPU", `${short(now.state / 1e9)} GB`],
    ]);
    bars.show(counts.map((n) => stepOn(n).efficiency));
    const bad = fields.filter((field) => !field.good).map((field) => field.name);
    ui.say(bad.length ? `${bad.join(", ")}: this number cannot be; the last good one counts.`
      : `${many(now.devices, "GPU")}: ${short(now.images)} images a second, efficiency ${share}.`);
    return { ...now, bad, chosen: selects.map((select) => select.selectedIndex) };
  };
}
