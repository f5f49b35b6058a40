//! Failures that a sender answers with.

use super::*;
use crate::wire::message::MAX_LONG_MESSAGE;

/// Bytes of the text of a failure, and of its details.
const TEXT: usize = 128 << 10;

impl World {
    /// Receives a key several times, and answers the request with a failure. Returns the bytes of
    /// the text and of the details in the errors of the receives.
    fn fail(&mut self, key: &TensorKey, receives: usize, answer: Vec<u8>) -> Vec<(usize, usize)> {
        let mut results: Vec<_> = (0..receives).map(|_| self.receive(key).1).collect();
        let said = std::mem::take(&mut *self.channel.0.lock().unwrap());
        let asked = said.into_iter().find_map(|said| match said {
            Said::Ask(request, _) => Some(request.id),
            Said::Finish(..) | Said::CleanUp(_) => None,
        });
        let (head, parts) = (AnswerHead::Failed.encode(), vec![Bytes::from(answer)]);
        self.receiver.answered((SENDER, asked.expect("a request")), Ok((head, parts)));
        self.tell();
        let errors = results.iter_mut().map(|result| value(result).expect("done").expect_err("failed"));
        let len = |error| match error {
            Error::Remote { status, .. } => (status.message.len(), status.details.len()),
            error => panic!("{error}"),
        };
        errors.map(len).collect()
    }
}

#[test]
fn a_long_failure_is_whole_in_the_first_receive_of_its_key() {
    let mut world = World::new();
    let status = Status::new(Code::Internal, "e".repeat(TEXT)).with_details(vec![7; TEXT]);
    let lens = world.fail(&key("x"), 3, head::encode_failure(status));
    assert_eq!(lens, [(TEXT, TEXT), (1024, 0), (1024, 0)]);
    let short = Status::new(Code::Internal, "e".repeat(1000));
    assert_eq!(world.fail(&key("x"), 2, head::encode_failure(short)), [(1000, 0), (1000, 0)]);
}

#[test]
fn the_long_failures_of_a_link_have_bounded_bytes() {
    let mut world = World::new();
    let status = Status::new(Code::Internal, "e".repeat(TEXT)).with_details(vec![7; TEXT]);
    let answer = head::encode_failure(status);
    let mut whole = 0;
    for n in 0..300 {
        let (text, details) = world.fail(&key(&format!("x {n}")), 1, answer.clone())[0];
        whole += usize::from(text == TEXT);
        assert!((text, details) == (TEXT, TEXT) || (text, details) == (4096, 0), "{text} {details}");
    }
    assert_eq!(whole, (64 << 20) / (2 * TEXT));
}

#[test]
fn a_failure_of_more_bytes_than_any_has_is_not_read() {
    let mut world = World::new();
    let [(text, _)] = world.fail(&key("x"), 1, vec![0; MAX_LONG_MESSAGE + 1])[..] else {
        panic!("one error")
    };
    assert!(text < 200, "{text}");
}

/// A peer can ask again and again, and read no answer.
#[test]
fn the_long_failures_that_a_peer_has_not_read_have_bounded_bytes() {
    let mut world = World::new();
    let status = Status::new(Code::Internal, "e".repeat(TEXT)).with_details(vec![7; TEXT]);
    world.sender.step_changed(StepChange::Aborted { steps: STEP..=STEP, status });
    let asked = |world: &mut World| {
        (0..300).for_each(|id| world.ask(&request(id, text(&key("x"), 70))));
        let lens = (0..300).map(|_| world.answers.lock().unwrap().pop_front().expect("an answer").2);
        lens.collect::<Vec<Bytes>>()
    };
    let unread = asked(&mut world);
    let whole = unread.iter().filter(|answer| answer.len() > 2 * TEXT).count();
    assert_eq!(whole, (64 << 20) / (2 * TEXT));
    assert!(unread.iter().rev().take(10).all(|answer| answer.len() < 5000));
    drop(unread);
    assert!(asked(&mut world)[0].len() > 2 * TEXT, "all are read");
}
