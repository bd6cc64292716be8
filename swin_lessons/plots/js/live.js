// A trained Swin in the page: ONNX Runtime Web runs the model that lies beside the page, on images of the reader's.
function build(data, ui) {
  const side = data.side, [H, W] = data.blocks[0].size, cell = side / H;
  let pixels = decode(data.samples[0].pixels); // 0 to 255, side x side, white on black
  let hidden = new Set(), token = [3, 4], result = null, session = null, drawing = false;

  const samples = ui.choice("Garment", data.samples.map((s) => s.name), () => { load(decode(data.samples[samples.index].pixels)); });
  const down = ui.slider("Down", data.shifts.map(String), data.shifts.indexOf(0), run);
  const right = ui.slider("Right", data.shifts.map(String), data.shifts.indexOf(0), run);
  const block = ui.slider("Block", data.blocks.map((_, i) => `${i + 1}`));
  const head = ui.slider("Head", [...Array(Math.max(...data.blocks.map((b) => b.heads)) + 1).keys()].map((h) => (h ? `${h}` : "mean")));
  const tool = ui.choice("A click", ["picks a token", "covers a window", "draws"]);
  ui.button("Clear", () => load(new Uint8Array(side * side)));
  ui.file("Your image", "image/*", read);
  const map = ui.board("The image, and what the token takes from where", H, W, (row, column) => {
    if (tool.index === 1) cover(row, column);
    else if (tool.index === 0) token = [row, column];
  }, 320);
  const bars = ui.bars("Class scores", data.classes);
  map.canvas.addEventListener("pointerdown", (event) => { drawing = tool.index === 2; dot(event); });
  map.canvas.addEventListener("pointermove", dot);
  window.addEventListener("pointerup", () => { drawing = false; });

  function decode(text) {
    return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  }

  function load(next) {
    pixels = next;
    hidden = new Set();
    run();
  }

  function cover(row, column) { // a window of the first block
    const name = Math.floor(row / data.window) * 100 + Math.floor(column / data.window);
    if (!hidden.delete(name)) hidden.add(name);
    run();
  }

  function dot(event) {
    if (!drawing) return;
    const box = map.canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * side, y = ((event.clientY - box.top) / box.height) * side;
    for (let i = 0; i < side * side; i++) {
      const far = Math.hypot((i % side) + 0.5 - x, Math.floor(i / side) + 0.5 - y);
      if (far < 2) pixels[i] = Math.max(pixels[i], Math.round(255 * Math.min(1, 2 - far)));
    }
    run();
  }

  function read(file) { // an image file: fitted into the square, bright on dark
    const picture = new Image();
    picture.addEventListener("load", () => {
      const canvas = make("canvas", { width: side, height: side }), c = canvas.getContext("2d");
      const scale = data.inner / Math.max(picture.width, picture.height);
      const [w, h] = [picture.width * scale, picture.height * scale];
      c.fillRect(0, 0, side, side);
      c.drawImage(picture, (side - w) / 2, (side - h) / 2, w, h);
      const rgba = c.getImageData(0, 0, side, side).data;
      const grey = Uint8Array.from({ length: side * side }, (_, i) => (rgba[4 * i] + rgba[4 * i + 1] + rgba[4 * i + 2]) / 3);
      URL.revokeObjectURL(picture.src);
      load(grey);
    });
    picture.addEventListener("error", () => ui.say("This file is no image that the browser can read."));
    picture.src = URL.createObjectURL(file);
  }

  // What the network sees: moved, with covered windows black.
  function seen() {
    const [dy, dx] = [data.shifts[down.index], data.shifts[right.index]];
    return Uint8Array.from({ length: side * side }, (_, i) => {
      const y = Math.floor(i / side), x = i % side, span = cell * data.window;
      if (hidden.has(Math.floor(y / span) * 100 + Math.floor(x / span))) return 0;
      const [row, column] = [y - dy, x - dx];
      return row < 0 || column < 0 || row >= side || column >= side ? 0 : pixels[row * side + column];
    });
  }

  async function start() {
    if (typeof WebAssembly !== "object") throw new Error("This browser has no WebAssembly, which runs the model. Another browser, or fewer security settings, will do.");
    if (!window.ort) await new Promise((resolve, reject) => {
      const script = make("script", { src: `${data.runtime}ort.wasm.min.js` });
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error(`${script.src} is missing: build the book again (make book).`)));
      document.head.append(script);
    });
    ort.env.wasm.numThreads = 1; // threads need headers that a plain server does not send
    ort.env.wasm.wasmPaths = new URL(data.runtime, document.baseURI).href;
    return ort.InferenceSession.create(data.model);
  }

  let running = false, again = false;
  async function run() {
    if (!session) return ui.draw();
    if (running) { again = true; return; }
    running = true;
    const input = Float32Array.from(seen(), (value) => (value / 255 - data.mean) / data.std);
    const began = performance.now();
    const out = await session.run({ images: new ort.Tensor("float32", input, [1, 1, side, side]) });
    result = { ms: performance.now() - began, logits: [...out.logits.data], maps: data.blocks.map((_, i) => out[`attention_${i + 1}`].data) };
    running = false;
    ui.draw();
    if (again) { again = false; run(); }
  }

  const onDisk = location.protocol === "file:"; // browsers keep such a page from reading the model
  if (onDisk) ui.say("A page opened from disk may not load the model. In the book's folder run `python3 -m http.server -d _build/html`, then open http://localhost:8000/book/live.html.");
  const go = !onDisk && ui.button(`Load the model (${data.megabytes} MB)`, async () => {
    ui.say("Loading ...");
    try {
      session = await start();
      go.remove();
      run();
    } catch (error) {
      ui.say(error.message);
    }
  });

  function softmax(logits) {
    const top = Math.max(...logits), powers = logits.map((z) => Math.exp(z - top)), sum = powers.reduce((a, b) => a + b);
    return powers.map((p) => p / sum);
  }

  function paint(b, weights) {
    const now = seen(), small = make("canvas", { width: side, height: side }), c = small.getContext("2d");
    const image = c.createImageData(side, side);
    now.forEach((value, i) => image.data.set([255 - value, 255 - value, 255 - value, 255], 4 * i));
    c.putImageData(image, 0, 0);
    map.clear(...b.size);
    map.context.imageSmoothingEnabled = false;
    map.context.drawImage(small, 0, 0, b.size[1], b.size[0]);
    const top = Math.max(...weights);
    weights.forEach((w, key) => {
      if (w > 0) map.fill(Math.floor(key / b.size[1]), key % b.size[1], `rgba(0, 114, 178, ${0.1 + (0.7 * w) / top})`);
    });
  }

  return () => {
    const b = data.blocks[block.index], tokens = b.size[0] * b.size[1];
    const [row, column] = token.map((t, axis) => Math.floor((t * b.size[axis]) / data.blocks[0].size[axis]));
    head.last = b.heads;
    const heads = head.index ? [head.index - 1] : [...Array(b.heads).keys()];
    const query = row * b.size[1] + column;
    const weights = [...Array(result ? tokens : 0).keys()].map((key) =>
      heads.reduce((sum, h) => sum + result.maps[block.index][(h * tokens + query) * tokens + key], 0) / heads.length);
    paint(b, weights);
    map.frame(row, column, ORANGE, 1, 1, 0.02 * b.size[1]);
    const shares = result ? softmax(result.logits) : [];
    const best = shares.indexOf(Math.max(...shares));
    if (result) bars.show(shares);
    if (result) ui.say(`${data.classes[best]}, ${Math.round(100 * shares[best])} %. One image took ${result.ms.toFixed(0)} ms.`);
    return { logits: result && result.logits, attention: weights, token: [row, column], hidden: hidden.size };
  };
}
