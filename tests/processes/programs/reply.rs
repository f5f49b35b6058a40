//! What a member says: one line for each command. It has a verdict, and the receives that have
//! ended.

use super::calls::Outcome;
use super::model::CallNo;
use super::program::Form;
use std::sync::Arc;
use std::time::Duration;
use tensorwire::internals::memory::{LockPolicy, PagePolicy, PoolOptions, Region, RegionOptions};
use tensorwire::{Code, DType, Error, Pool, Status, TaskId, Tensor, TensorMeta};

/// Each reply begins with it.
pub const REPLY: &str = "reply=";
/// What a member says when it stops begins with it: how many links it has repaired.
pub const REPAIRS: &str = "repairs=";

/// How a command has ended.
#[derive(Debug)]
pub enum Verdict {
    Ok,
    /// The pool has no room for a tensor that the member would give.
    NoRoom,
    /// The call was refused.
    Refused(Error),
    /// The wait for a batch failed.
    Failed(Error),
    /// The call has ended before, or something is wrong.
    Not(String),
}

/// The reply to a command.
pub fn reply(verdict: &Verdict, ended: &[(CallNo, Outcome)]) -> String {
    let verdict = match verdict {
        Verdict::Ok => "ok".to_owned(),
        Verdict::NoRoom => "noroom".to_owned(),
        Verdict::Refused(error) => format!("refused {}", error_text(error)),
        Verdict::Failed(error) => format!("failed {}", error_text(error)),
        Verdict::Not(why) => format!("not {}", one_line(why)),
    };
    let ended = ended.iter().map(|(call, outcome)| match outcome {
        Ok((_, true)) => format!("\t{call} dead"),
        Ok((tensor, false)) => format!("\t{call} got {} {}", meta_text(tensor.meta()), hex(tensor.bytes())),
        Err(error) => format!("\t{call} error {}", error_text(error)),
    });
    format!("{REPLY}{verdict}{}", ended.collect::<String>())
}

/// Reads replies. The tensors are copies in its pool.
pub struct Reader {
    pool: Pool,
}

impl Reader {
    pub fn new() -> Reader {
        let region =
            RegionOptions { pages: PagePolicy::Plain, lock: LockPolicy::No, ..RegionOptions::new(4 << 20) };
        let region = Region::create(0, &region).expect("memory");
        Reader { pool: Pool::new(region, PoolOptions::default()).expect("a pool") }
    }

    pub fn read(&self, line: &str) -> (Verdict, Vec<(CallNo, Outcome)>) {
        let (_, line) = line.split_once(REPLY).expect("a reply");
        let mut parts = line.split('\t');
        let (kind, rest) = word(parts.next().expect("a verdict"));
        let verdict = match kind {
            "ok" => Verdict::Ok,
            "noroom" => Verdict::NoRoom,
            "refused" => Verdict::Refused(self.error(rest)),
            "failed" => Verdict::Failed(self.error(rest)),
            "not" => Verdict::Not(rest.to_owned()),
            _ => panic!("what is {line:?}?"),
        };
        let ended = parts.map(|part| {
            let (call, rest) = word(part);
            let (kind, rest) = word(rest);
            let outcome = match kind {
                "dead" => Ok((self.tensor(&read_meta("u8:0:0"), ""), true)),
                "got" => {
                    let (meta, bytes) = word(rest);
                    Ok((self.tensor(&read_meta(meta), bytes), false))
                }
                "error" => Err(self.error(rest)),
                _ => panic!("what is {part:?}?"),
            };
            (call.parse().expect("a number"), outcome)
        });
        (verdict, ended.collect())
    }

    fn tensor(&self, meta: &TensorMeta, bytes: &str) -> Tensor {
        let mut tensor = self.pool.tensor(meta.clone()).expect("room for one value at a time");
        let read = |at: usize| u8::from_str_radix(&bytes[2 * at..2 * at + 2], 16).expect("hexadecimal");
        tensor.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = read(at));
        tensor.freeze()
    }

    /// An error of the same kind. What the model does not look at is made up.
    fn error(&self, text: &str) -> Error {
        let (kind, rest) = word(text);
        let (detail, text) = word(rest);
        let (key, peer) = (text.to_owned(), TaskId::new("w", 0).expect("a job name"));
        let status = |code| Status::new(code, text);
        let code = || Code::from_number(detail.parse().expect("a number")).expect("a code");
        match kind {
            "Cancelled" => Error::Cancelled { key },
            "DeadlineExceeded" => Error::DeadlineExceeded { key, after: Duration::ZERO },
            "Aborted" => Error::Aborted { step: 0.into(), status: status(Code::Internal) },
            "StepGone" => Error::StepGone { step: 0.into() },
            "StandingExists" => Error::StandingExists { edge: key },
            "NotConnected" => Error::NotConnected { peer },
            "Remote" => Error::Remote { peer, key, status: status(code()) },
            "ShapeMismatch" => {
                let sent = Box::new(read_meta(detail));
                Error::ShapeMismatch { key, given: sent.clone(), sent }
            }
            "ResourceExhausted" => Error::ResourceExhausted { what: "a limit", limit: 0, remedy: "" },
            "BatchTooLarge" => Error::BatchTooLarge { values: 0, waiting: 0, limit: 0 },
            "NoRoom" => {
                let larger = Form { dtype: DType::U8, dims: vec![1 << 40], serialized: 0 };
                let source = self.pool.tensor(larger.meta()).map(drop).expect_err("beyond the pool");
                Error::NoRoom { key, source: Arc::new(source), granted: None }
            }
            // No call here may have it, so its text is enough.
            _ => Error::Remote { peer, key: "(another error)".into(), status: status(Code::Unknown) },
        }
    }
}

/// The kind of an error, what the model looks at beside it, and its text.
fn error_text(error: &Error) -> String {
    let (kind, detail) = match error {
        Error::Cancelled { .. } => ("Cancelled", "-".into()),
        Error::DeadlineExceeded { .. } => ("DeadlineExceeded", "-".into()),
        Error::Aborted { .. } => ("Aborted", "-".into()),
        Error::StepGone { .. } => ("StepGone", "-".into()),
        Error::StandingExists { .. } => ("StandingExists", "-".into()),
        Error::PeerLost { .. } | Error::NotConnected { .. } => ("NotConnected", "-".into()),
        Error::Remote { status, .. } => ("Remote", (status.code as u8).to_string()),
        Error::ShapeMismatch { sent, .. } => ("ShapeMismatch", meta_text(sent)),
        Error::ResourceExhausted { .. } => ("ResourceExhausted", "-".into()),
        Error::BatchTooLarge { .. } => ("BatchTooLarge", "-".into()),
        Error::NoRoom { .. } => ("NoRoom", "-".into()),
        _ => ("Other", "-".into()),
    };
    format!("{kind} {detail} {}", one_line(&error.to_string()))
}

fn meta_text(meta: &TensorMeta) -> String {
    let dims: Vec<String> = meta.shape().dims().iter().map(u64::to_string).collect();
    format!("{}:{}:{}", meta.dtype(), dims.join(","), meta.bytes())
}

fn read_meta(text: &str) -> TensorMeta {
    let [dtype, dims, bytes] = text.split(':').collect::<Vec<_>>()[..] else { panic!("what is {text:?}?") };
    let dtype = *DType::ALL.iter().find(|known| known.to_string() == dtype).expect("a type");
    let number = |text: &str| text.parse().expect("a number");
    let dims = dims.split(',').filter(|dim| !dim.is_empty()).map(number).collect();
    Form { dtype, dims, serialized: number(bytes) }.meta()
}

fn word(text: &str) -> (&str, &str) {
    text.split_once(' ').unwrap_or((text, ""))
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\t'], " ")
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).expect("four bits");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
