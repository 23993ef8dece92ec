//! `roundhouse generate`: all prompts at once, each in a lane, answered in order.

use runtime::engine::{Event, Finished, OpenEngine, RoundCounts, Ticket, Token};
use runtime::request::Submission;
use runtime::sha::token_sha;
use serde_json::{Map, Value, json};

use super::{engine_failure, open};
use crate::args::{GenerateArgs, check_sampling};
use crate::failure::Failure;
use crate::output::{Output, note};
use crate::prompts::{self, Reader};
use crate::ranks::{self, Begun};

/// Answers every prompt.
pub(crate) fn generate(args: &GenerateArgs) -> Result<(), Failure> {
    let asked = asked(args)?;
    let inputs = prompts::read(args)?;
    let chosen = args.engine.run.choose()?;
    let options = args.engine.options(&chosen);
    let queue = options.queue as usize;
    if inputs.len() > queue {
        return Err(Failure::Input(format!(
            "{} prompts are more than the {queue} that may wait; give fewer --prompt or --ids at once",
            inputs.len()
        )));
    }
    let Begun::Leads(rank) = ranks::begin(&args.engine.ranks, &args.model, &options)? else { return Ok(()) };
    let OpenEngine { engine, tokenizer, chat, sight } = open(&args.model, &options, &chosen, rank)?;
    let vocab = engine.runner().model.config.vocab_size;
    check_sampling(&asked.sampling, vocab)?;
    let context = engine.state().limits().context as usize;
    let reader = Reader { tokenizer: &tokenizer, chat: &chat, sight, context };
    let mut submissions = Vec::new();
    for (number, prompt) in (1..).zip(inputs) {
        let (prompt, media) = prompt.read(&reader)?;
        let submission = Submission { prompt, media, ..asked.clone() };
        submission.check(vocab).map_err(|error| Failure::Input(format!("prompt {number}: {error}")))?;
        submissions.push(submission);
    }

    let (handle, thread) = engine.spawn();
    let tickets: Vec<Ticket> = submissions
        .into_iter()
        .map(|submission| handle.submit(submission).map_err(engine_failure))
        .collect::<Result<_, _>>()?;
    let mut out = Output::stdout();
    let replies = replies(&tickets, args, &mut out);
    // After a failure, nobody waits for the others.
    drop(tickets);
    thread.stop().map_err(engine_failure)?;
    let replies = replies?;
    if args.json {
        let logprobs = args.sampling.logprobs.is_some();
        let mut reports: Vec<Value> = replies.iter().map(|reply| reply.to_json(logprobs)).collect();
        let report = if reports.len() == 1 { reports.remove(0) } else { Value::Array(reports) };
        out.print(&format!("{report}\n"));
    }
    out.finish()
}

/// What is asked of the model, before any prompt is known.
fn asked(args: &GenerateArgs) -> Result<Submission, Failure> {
    Ok(Submission {
        max_tokens: args.max_tokens,
        sampling: args.sampling.options()?,
        stop_ids: args.stop_id.iter().flat_map(|ids| ids.0.iter().copied()).collect(),
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..Submission::new(Vec::new())
    })
}

/// Follows the requests in order; prints text unless JSON was asked for. The only one is printed as it is
/// made, several when each is whole.
fn replies(
    tickets: &[Ticket],
    args: &GenerateArgs,
    out: &mut Output<std::io::Stdout>,
) -> Result<Vec<Reply>, Failure> {
    let streams = tickets.len() == 1 && !args.json;
    let mut replies = Vec::new();
    for (number, ticket) in tickets.iter().enumerate() {
        let reply = Reply::follow(ticket, number + 1, |text| {
            if streams {
                out.print(text);
            }
            if out.is_closed() {
                tickets.iter().for_each(Ticket::cancel);
            }
        })?;
        if !args.json {
            let rest = if streams { "" } else { reply.text.as_str() };
            out.print(&format!("{rest}\n"));
            note(reply.note());
        }
        replies.push(reply);
    }
    Ok(replies)
}

/// A complete reply.
struct Reply {
    tokens: Vec<Token>,
    text: String,
    finished: Finished,
}

impl Reply {
    /// Waits for the end of a request; `show` is given its text as it is made.
    fn follow(ticket: &Ticket, number: usize, mut show: impl FnMut(&str)) -> Result<Reply, Failure> {
        let (mut tokens, mut text) = (Vec::new(), String::new());
        let wrong = |why: String| format!("prompt {number}: {why}");
        loop {
            match ticket.events.recv() {
                Ok(Event::Token(token)) => {
                    show(&token.text);
                    text += &token.text;
                    tokens.push(token);
                }
                Ok(Event::Finished(finished)) => {
                    show(&finished.text);
                    text += &finished.text;
                    return Ok(Reply { tokens, text, finished });
                }
                Ok(Event::Refused(why)) => return Err(Failure::Input(wrong(why))),
                Ok(Event::Full { waiting }) => {
                    let why = format!("{waiting} requests wait already; give fewer prompts at once");
                    return Err(Failure::Input(wrong(why)));
                }
                Ok(Event::Failed(why)) => return Err(Failure::Device(wrong(why))),
                Err(_) => return Err(Failure::Device(wrong("the engine ended before it answered".into()))),
            }
        }
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    fn to_json(&self, logprobs: bool) -> Value {
        let Finished { reason, prompt_tokens, completion_tokens, rounds, .. } = &self.finished;
        let ids = self.ids();
        let mut report = json!({
            "ids": ids,
            "text": self.text,
            "finish_reason": reason.to_string(),
            "token_sha": token_sha(&ids),
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
            "rounds": rounds_json(rounds),
        });
        if logprobs {
            report["logprobs"] = self.tokens.iter().map(logprobs_json).collect();
        }
        report
    }

    fn note(&self) -> String {
        let Finished { reason, prompt_tokens, completion_tokens, rounds, .. } = &self.finished;
        let sha = token_sha(&self.ids());
        format!(
            "{reason} after {completion_tokens} tokens, prompt of {prompt_tokens}, token_sha {sha}, rounds: {rounds}"
        )
    }
}

fn logprobs_json(token: &Token) -> Value {
    json!({ "id": token.id, "logprob": token.logprob, "top": token.top })
}

fn rounds_json(rounds: &RoundCounts) -> Value {
    let eager: Map<String, Value> =
        rounds.eager.iter().map(|(reason, count)| (reason.to_string(), json!(count))).collect();
    json!({ "captured": rounds.captured, "replayed": rounds.replayed, "eager": eager })
}
