// One of the two requests of the form.

import { byId, make } from "./dom.js";
import { FIELDS } from "./state.js";
import { offered, TASKS, usual } from "./tasks.js";
import { FORMATS, guessFormat, readItems, readLabels } from "./texts.js";

export class Side {
  /** @param {string} name A or B */
  constructor(name, onChange) {
    this.name = name;
    this.info = null;
    const copied = byId("side").content.cloneNode(true);
    this.element = copied.querySelector("fieldset");
    this.element.querySelector("legend").textContent = `Request ${name}`;
    this.inputs = Object.fromEntries([...this.element.querySelectorAll("[name]")].map((one) => [one.name, one]));
    for (const input of Object.values(this.inputs)) {
      input.addEventListener("input", () => { this.update(); onChange(this, input.name); });
    }
    this.inputs.format.append(...FORMATS.map((one) => make("option", { value: one }, one === "lines" ? one : one.toUpperCase())));
    this.acceptFiles(onChange);
  }

  /** Show what the model offers. */
  describe(info, models) {
    this.info = info;
    const chosen = this.inputs.task.value;
    const tasks = offered(info);
    this.inputs.task.replaceChildren(...tasks.map((task) => make("option", { value: task }, TASKS[task].name)));
    this.inputs.task.value = tasks.includes(chosen) ? chosen : usual(info);
    const model = this.inputs.model.value;
    this.inputs.model.replaceChildren(...["", ...models].map((one) => make("option", { value: one }, one || "default")));
    this.inputs.model.value = models.includes(model) ? model : "";
    const family = info.gpuscore.family;
    const kept = this.inputs.family.value;
    this.inputs.family.replaceChildren(make("option", { value: "" }, "query + item, as they are"),
      ...(family ? [make("option", { value: family.name }, `prompt of ${family.name}`)] : []));
    this.inputs.family.value = family && kept === family.name ? kept : "";
    this.update();
  }

  /** Show only the fields that the task uses. */
  update() {
    const task = TASKS[this.inputs.task.value];
    if (!task) return;
    for (const field of this.element.querySelectorAll("[data-field]")) {
      field.hidden = !task.uses.includes(field.dataset.field);
    }
    const takes = this.info.gpuscore.family?.prompt.some((part) => part.includes("{instruction}"));
    if (!takes) this.element.querySelector('[data-field="instruction"]').hidden = true;
    this.element.querySelector(".query-name").textContent = task.query;
    this.element.querySelector(".items-name").textContent = task.items;
  }

  /** @returns {Record<string, string>} the fields as the address has them */
  get state() {
    return Object.fromEntries(Object.keys(FIELDS).map((name) => {
      const input = this.inputs[name];
      return [name, input.type === "checkbox" ? (input.checked ? "1" : "0") : input.value];
    }));
  }

  set state(given) {
    for (const [name, value] of Object.entries(given)) {
      const input = this.inputs[name];
      if (input.type === "checkbox") input.checked = value !== "0";
      else {
        // A choice that is not known yet becomes one; `describe` drops it if the server lacks it.
        if (input.tagName === "SELECT" && ![...input.options].some((o) => o.value === value)) {
          input.append(make("option", { value }, value));
        }
        input.value = value;
      }
    }
    if (this.info) this.update();
  }

  /** The form's values as a request needs them; raises SyntaxError for items that cannot be read. */
  read(instead) {
    const { items, format, labels, ...plain } = this.state;
    const own = readItems(items, format);
    return {
      ...plain, items: own.length === 0 && instead ? instead : own, labels: readLabels(labels),
      softmax: plain.softmax === "1",
    };
  }

  get task() { return TASKS[this.inputs.task.value]; }

  acceptFiles(onChange) {
    const take = async (file) => {
      if (!file) return;
      const text = await file.text();
      this.state = { ...this.state, items: text, format: guessFormat(file.name, text) };
      onChange(this, "items");
    };
    const zone = this.inputs.items;
    zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      zone.classList.remove("over");
      if (event.dataTransfer.files.length === 0) return;
      event.preventDefault();
      take(event.dataTransfer.files[0]);
    });
    const chooser = this.element.querySelector("input[type=file]");
    chooser.addEventListener("change", () => take(chooser.files[0]));
  }
}
