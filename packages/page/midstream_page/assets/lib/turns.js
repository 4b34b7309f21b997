// A chat as text: a turn begins on a line with its role, such as `user: hello`.

const ROLE = /^(system|user|assistant): ?/;

/** The messages of a text; without a role on its first line, that is the user's. */
export function messagesOf(text) {
  const messages = [];
  for (const line of text.split("\n")) {
    const role = ROLE.exec(line);
    if (role) messages.push({ role: role[1], content: line.slice(role[0].length) });
    else if (messages.length) messages.at(-1).content += `\n${line}`;
    else messages.push({ role: "user", content: line });
  }
  return messages;
}

/** The text of messages that `messagesOf` made; a lone turn of the user without its role. */
export function textOf(messages) {
  if (messages.length === 1 && messages[0].role === "user" && !ROLE.test(messages[0].content))
    return messages[0].content;
  return messages.map(({ role, content }) => `${role}: ${content}`).join("\n");
}
