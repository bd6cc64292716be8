// What all explorers share. Each figure carries its own copy: nothing leaks, and a page opened from disk works.
const BLACK = "#222222", GREY = "#8c8c8c", BLUE = "#0072b2", ORANGE = "#e69f00", RED = "#d55e00", SKY = "#56b4e9";

const many = (n, thing) => `${n} ${thing}${Math.abs(n) === 1 ? "" : "s"}`;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Controls for one figure. Whatever the reader changes, `ui.draw` runs; what it says is read out.
function toolkit(figure) {
  const stage = figure.querySelector(".explorer");
  const bar = make("div", { style: "display: flex; flex-wrap: wrap; gap: 0.25em 1.5em; align-items: center" });
  const boards = make("div", { style: "display: flex; flex-wrap: wrap; gap: 0.5em 1.5em; margin: 0.5em 0" });
  const status = make("output", { "aria-live": "polite", style: "display: block; min-height: 1.6em" });
  stage.append(bar, boards, status);
  const ui = { draw() {} };
  let count = 0;

  const labelled = (name, control) => {
    control.id = `${figure.id}-${count++}`;
    return make("label", { for: control.id }, name);
  };

  // A range over `names`; `.index` is what is chosen.
  ui.slider = (name, names, start = 0, changed = () => ui.draw()) => {
    const input = make("input", { type: "range", min: 0, max: names.length - 1, value: start, style: "width: 9em" });
    const shown = make("output", { style: "min-width: 3em" });
    const label = labelled(name, input);
    const slider = {
      get index() { return Number(input.value); },
      set index(value) { input.value = value; tell(); },
      set last(value) { input.max = value; tell(); },
    };
    const tell = () => {
      shown.textContent = names[slider.index];
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    input.addEventListener("input", () => { tell(); changed(); });
    input.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab would take the arrows
    bar.append(make("span", { style: "display: flex; gap: 0.5em; align-items: center" }, label, input, shown));
    tell();
    return slider;
  };

  // A box to tick.
  ui.tick = (name, checked) => {
    const input = make("input", { type: "checkbox" });
    input.checked = checked;
    const label = labelled(name, input);
    input.addEventListener("change", () => ui.draw());
    bar.append(make("span", {}, input, " ", label));
    return { get on() { return input.checked; } };
  };

  // A choice among few names.
  ui.choice = (name, names, changed = () => ui.draw()) => {
    const select = make("select", {}, ...names.map((text, i) => make("option", { value: i }, text)));
    const label = labelled(name, select);
    select.addEventListener("change", () => changed());
    bar.append(make("span", {}, label, " ", select));
    return { get index() { return select.selectedIndex; } };
  };

  // A button; returns its element.
  ui.button = (name, pressed) => {
    const button = make("button", { type: "button", class: "btn btn-sm btn-outline-primary" }, name);
    button.addEventListener("click", pressed);
    bar.append(button);
    return button;
  };

  // A file of the reader's; `chosen(file)` hears of it.
  ui.file = (name, accept, chosen) => {
    const input = make("input", { type: "file", accept, style: "max-width: 15em" });
    const label = labelled(name, input);
    input.addEventListener("change", () => input.files[0] && chosen(input.files[0]));
    bar.append(make("span", {}, label, " ", input));
  };

  // Shares of 0 to 1 as bars with their names.
  ui.bars = (name, labels) => {
    const rows = labels.map((label) => {
      const bar = make("div", { style: `background: ${BLUE}; height: 0.9em; width: 0` });
      const number = make("td", { style: "text-align: right; padding-left: 0.5em" });
      const row = make("tr", {}, make("th", { scope: "row", style: "font-weight: normal; text-align: left; padding-right: 0.5em" }, label),
        make("td", { style: "width: 8em" }, bar), number);
      return { row, bar, number };
    });
    boards.append(make("table", { style: "border-collapse: collapse; align-self: center" },
      make("caption", { style: "text-align: left; caption-side: top; color: inherit" }, name), ...rows.map((r) => r.row)));
    return { show: (shares) => rows.forEach((r, i) => {
      r.bar.style.width = `${100 * shares[i]}%`;
      r.number.textContent = `${Math.round(100 * shares[i])} %`;
    }) };
  };

  ui.board = (name, rows, columns, pick, px = 288) => board(boards, ui, name, rows, columns, pick, px);
  ui.say = (text) => { status.textContent = text; };
  return ui;
}

// A map of cells on a canvas. Click a cell, or move with the arrow keys; `pick(row, column)` hears of it.
function board(parent, ui, name, rows, columns, pick, px) {
  const style = `width: ${px}px; max-width: 100%; background: #fff; border: 1px solid #8c8c8c; box-sizing: border-box; touch-action: manipulation`;
  const canvas = make("canvas", { style });
  const context = canvas.getContext("2d");
  const map = { rows, columns, canvas, context, at: [0, 0] };
  if (pick) {
    const role = { role: "application", tabindex: 0, "aria-roledescription": "map of tokens" };
    for (const [key, value] of Object.entries(role)) canvas.setAttribute(key, value);
    canvas.style.cursor = "pointer";
  } else {
    canvas.setAttribute("role", "img");
  }
  canvas.setAttribute("aria-label", name);
  const caption = make("div", { style: "text-align: center", "aria-hidden": "true" }, name);
  parent.append(make("div", { style: "max-width: 100%" }, canvas, caption));

  const choose = (row, column) => {
    map.at = [Math.min(Math.max(row, 0), map.rows - 1), Math.min(Math.max(column, 0), map.columns - 1)];
    pick(...map.at);
    ui.draw();
  };
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (pick) {
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * map.rows);
      choose(row, Math.floor(((event.clientX - box.left) / box.width) * map.columns));
    });
    canvas.addEventListener("keydown", (event) => {
      event.stopPropagation();
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault(); // the page must not scroll
      choose(map.at[0] + step[0], map.at[1] + step[1]);
    });
  }

  // Start a drawing of `r` by `c` cells; a cell is then one unit wide.
  map.clear = (r = map.rows, c = map.columns) => {
    Object.assign(map, { rows: r, columns: c });
    const scale = window.devicePixelRatio || 1;
    canvas.width = px * scale;
    canvas.height = ((px * r) / c) * scale;
    context.scale(canvas.width / c, canvas.height / r);
  };
  map.fill = (row, column, colour, height = 1, width = 1) => {
    context.fillStyle = colour;
    context.fillRect(column, row, width, height);
  };
  map.frame = (row, column, colour, height = 1, width = 1, thick = 0.08) => {
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.strokeRect(column + thick / 2, row + thick / 2, width - thick, height - thick);
  };
  map.text = (row, column, text, colour = BLACK, size = 0.38) => {
    context.save();
    context.scale(0.01, 0.01); // browsers refuse letters smaller than a unit
    context.fillStyle = colour;
    context.font = `${size * 100}px sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, (column + 0.5) * 100, (row + 0.53) * 100);
    context.restore();
  };
  return map;
}

// Find the figure, build its controls with `build(data, ui)`, and replace the printed picture by them.
function explorer(id, build) {
  const figure = document.getElementById(id);
  const data = JSON.parse(figure.querySelector("script").textContent);
  const ui = toolkit(figure);
  const draw = build(data, ui);
  ui.draw = () => { figure.dataset.state = JSON.stringify(draw()); }; // what a test can read
  ui.draw();
  figure.classList.add("ready");
}
