// Run the checks of a client's program and print a JSON line for each: what the programs in JavaScript share.
// Knows the service by three variables, and asks it for nothing but its rows.

export const { BASE_URL, TOKEN, MODEL } = process.env;
export const QUESTION = "What is in Austin?";
export const WRONG_JWT = "no-jwt";
export const WRONG_JWT_TEXT = "JWT is not three base64url parts";
export const UNKNOWN_MODEL = "gpt-9";
export const UNKNOWN_MODEL_TEXT = "The model 'gpt-9' does not exist";
export const OVERFLOW_TEXT = "maximum context length";
export const TOO_LONG = "one more word ".repeat(4000);
export const LONG_ANSWER_TOKENS = 1500;

const LEAVING_SECONDS = 3;

export class Fault extends Error {}

// Throws a Fault with what was got unless the condition holds.
export function expect(condition, got) {
  if (!condition) throw new Fault(`got ${JSON.stringify(got)}`);
}

// Returns what `call` throws; throws a Fault unless it is of a kind and has our text in its own.
export async function expectThrown(kind, call, text) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    expect(error instanceof kind && String(error.message).includes(text), `${error.name}: ${error.message}`);
    return error;
  }
  throw new Fault(`no ${kind.name} but ${JSON.stringify(answer)}`);
}

export function expectWeather({ city, days, ...others }) {
  const keepsTo = ["Austin", "Paris"].includes(city) && Number.isInteger(days) && days >= 1 && days <= 9;
  expect(keepsTo && Object.keys(others).length === 0, { city, days, ...others });
}

export async function numRowsInUse() {
  const answer = await fetch(`${BASE_URL}/rows`, { headers: { Authorization: `Bearer ${TOKEN}` } });
  return (await answer.json()).num_rows_in_use;
}

// Throws a Fault unless a row is in use, `leave` is called, and none is soon afterwards.
export async function expectRowFreed(leave) {
  expect((await numRowsInUse()) === 1, "no row in use while the stream is open");
  await leave();
  const deadline = Date.now() + LEAVING_SECONDS * 1000;
  while (await numRowsInUse()) {
    expect(Date.now() < deadline, "a row still in use after the client has left");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// Runs the functions of an object whose names the command line does not leave out.
export async function runChecks(checks) {
  const leftOut = process.argv.slice(2);
  for (const [check, run] of Object.entries(checks)) {
    if (leftOut.includes(check)) continue;
    let fault = null;
    try {
      await run();
    } catch (error) {
      fault = error instanceof Fault ? error.message : `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ check, fault }));
  }
}
