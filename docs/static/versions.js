// A list of the versions in place of the link to their page. Where versions.json cannot be read, as from a file
// system, the link stays.
"use strict";

(async () => {
  const link = document.querySelector(".sidebar-versions a");
  const root = new URL(link.dataset.root, location);
  const { versions } = await (await fetch(new URL("versions.json", root))).json();
  const list = document.createElement("select");
  list.setAttribute("aria-label", "Version");
  for (const version of versions) {
    list.add(new Option(version, version, false, version === link.dataset.version));
  }
  list.addEventListener("change", async () => {
    const page = new URL(`${list.value}/${link.dataset.page}`, root);
    const found = (await fetch(page, { method: "HEAD" })).ok;
    location = found ? page : new URL(`${list.value}/index.html`, root);
  });
  link.replaceWith("Version: ", list);
})().catch(() => {});
