// Conversations in this browser's IndexedDB; the server keeps none.

let database = null;

/** Returns the result of a request to the database. */
function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function store(mode) {
  database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("penstock", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    result(opening).then(resolve, reject);
  });
  return (await database).transaction("conversations", mode).objectStore("conversations");
}

/** Returns all conversations, the newest first. */
export async function loadAll() {
  const all = await result((await store("readonly")).getAll());
  return all.sort((one, other) => other.changed - one.changed);
}

export async function save(conversation) {
  await result((await store("readwrite")).put(conversation));
}

export async function remove(id) {
  await result((await store("readwrite")).delete(id));
}
