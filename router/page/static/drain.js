// Draining a replica: asked for once more with its name, and with the admin key, which is kept in this page's memory only.

import { some } from "./words.js";

export class Drain {
  constructor(said) {
    this.said = said;
    this.key = "";
    this.replica = null;
    const find = (id) => document.getElementById(id);
    this.dialog = find("drain");
    [this.title, this.words, this.failed] = [find("drain-title"), find("drain-words"), find("drain-failed")];
    [this.input, this.go] = [find("key"), find("drain-do")];
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("drain-leave").addEventListener("click", () => this.dialog.close());
  }

  ask(replica) {
    this.replica = replica;
    const word = replica.drained ? "Undrain" : "Drain";
    this.title.textContent = `${word} ${replica.name}?`;
    this.words.textContent = replica.drained
      ? "It gets new requests again, from now on."
      : `It gets nothing new. ${runs(replica.booked)}`;
    this.go.textContent = word;
    this.failed.textContent = "";
    this.input.value = this.key;
    this.dialog.showModal();
    (this.key ? this.go : this.input).focus();
  }

  async send() {
    const call = this.replica.drained ? "undrain" : "drain";
    this.go.disabled = true;
    try {
      const response = await fetch(`replicas/${call}`, {
        method: "POST",
        headers: { authorization: `Bearer ${this.input.value}`, "content-type": "application/json" },
        body: JSON.stringify({ name: this.replica.name }),
      });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      this.key = this.input.value;
      this.dialog.close();
      this.said(`${this.replica.name} is ${answer.state}.`);
    } catch (error) {
      if (!this.dialog.open) return;
      this.failed.textContent = `${error.message}.`;
      this.input.select();
    } finally {
      this.go.disabled = false;
    }
  }
}

function runs(booked) {
  if (booked === 0) return "Nothing runs there through this router.";
  return booked === 1 ? "The request that runs there ends as it would." : `The ${some(booked, "request")} that run there end as they would.`;
}
