// Acts as a user on the page and writes down what it sees; the test reads it from the DOM.
(async () => {
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
  // A headless browser may run out of virtual time before it shows a frame, so frames come by the clock here.
  window.requestAnimationFrame = (draw) => setTimeout(draw, 0);
  window.cancelAnimationFrame = clearTimeout;
  const frame = () => sleep(20);
  while (!document.documentElement.dataset.ready) await sleep(10);
  const seen = { ready: Number(document.documentElement.dataset.ready), colours: [] };
  const canvases = [...document.querySelectorAll(".view canvas:first-child")], canvas = canvases[0];
  const tip = document.getElementById("tip");
  const distinct = (c) => new Set(new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size;
  for (const each of canvases) seen.colours.push(distinct(each));
  const view = () => canvas.dataset.view.split(" ").map(Number);
  const at = (time, row) => {
    const box = canvas.getBoundingClientRect(), [begin, end] = view();
    const rowHeight = (box.height - 24) / WORKERS;
    return { clientX: box.left + 34 + ((time - begin) / (end - begin)) * (box.width - 36), clientY: box.top + (row + 0.5) * rowHeight };
  };
  const point = (name, where) => canvas.dispatchEvent(new PointerEvent(name, { ...where, pointerId: 1, bubbles: true }));
  const overlay = () => distinct(canvas.nextElementSibling);

  seen.full = view();
  point("pointermove", at(HOVER_TIME, HOVER_ROW));
  seen.tip = tip.textContent;
  seen.shown = getComputedStyle(tip).display;
  seen.traced = overlay() > 1;
  point("pointerleave", at(HOVER_TIME, HOVER_ROW));
  seen.left = [getComputedStyle(tip).display, overlay()];

  canvas.dispatchEvent(new WheelEvent("wheel", { ...at(2, 0), deltaY: -600, bubbles: true, cancelable: true }));
  await frame();
  seen.zoomed = view();
  seen.linked = canvases.every((c) => c.dataset.view === canvas.dataset.view);
  const from = at(2, 0);
  point("pointerdown", from);
  point("pointermove", { ...from, clientX: from.clientX - 40 });
  point("pointerup", { ...from, clientX: from.clientX - 40 });
  await frame();
  seen.panned = view();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0", bubbles: true, cancelable: true }));
  await frame();
  seen.reset = view();

  const before = canvas.toDataURL();
  const select = document.getElementById("colour");
  select.value = "head";
  select.dispatchEvent(new Event("change"));
  await frame();
  seen.recoloured = canvas.toDataURL() !== before;
  const error = document.getElementById("error");
  seen.error = error.textContent;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const result = document.createElement("pre");
  result.id = "selftest";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
})();
