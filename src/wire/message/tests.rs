use super::fragment::{Assembler, FragmentError, cut, is_fragment};
use super::*;
use crate::wire::{
    Code, DType, EdgeId, Grant, Immediate, SHORT_MESSAGE, SHORT_WORDS, Shape, ShortMessage, Slot, Status,
    UnreadMessage,
};
use proptest::prelude::*;

fn edge() -> impl Strategy<Value = EdgeId> {
    any::<(u32, u16)>().prop_map(|(number, generation)| EdgeId { number, generation })
}

fn status() -> impl Strategy<Value = Status> {
    ("[a-z \u{e4}]{0,40}", proptest::collection::vec(any::<u8>(), 0..20), any::<bool>())
        .prop_map(|(message, details, derived)| Status { code: Code::Internal, message, details, derived })
}

fn value(data: &[u8]) -> impl Strategy<Value = RecordValue<'_>> {
    prop_oneof![
        any::<u16>().prop_map(move |meta| RecordValue::Bytes { meta, data }),
        any::<(u16, u32)>().prop_map(|(meta, offer)| RecordValue::Offer { meta, offer }),
        any::<u16>().prop_map(|meta| RecordValue::Written { meta }),
        Just(RecordValue::Dead),
        status().prop_map(RecordValue::Error),
    ]
}

/// The message survives its encoding, and no part of its bytes is a message. A record with bytes
/// has them to its end, so a part of it is one.
fn comes_back(message: &Message<'_>) -> Result<(), TestCaseError> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    prop_assert!(bytes.len() <= MAX_LONG_MESSAGE);
    prop_assert_eq!(&Message::decode(&bytes).expect("own message"), message);
    let has_rest = matches!(message, Message::Record { value: RecordValue::Bytes { .. }, .. });
    for end in 0..bytes.len() {
        prop_assert!(has_rest || Message::decode(&bytes[..end]).is_err(), "cut at {}", end);
    }
    bytes.push(0);
    prop_assert!(has_rest || Message::decode(&bytes).is_err(), "a byte too many");
    Ok(())
}

fn short_of(plain: &PlainRecord<'_>) -> Option<ShortMessage> {
    plain.to_short().map(|message| message.read())
}

/// A record of a small tensor is the same as a short message.
fn same_as_short(plain: &PlainRecord<'_>, bytes: &[u8]) -> Result<(), TestCaseError> {
    let PlainRecord { edge, n, step, meta, data } = *plain;
    let Some(short) = short_of(plain) else {
        prop_assert!(data.len() > SHORT_TENSOR);
        return Ok(());
    };
    prop_assert_eq!(&short.to_bytes()[..short.len], bytes);
    prop_assert_eq!(ShortMessage::from_bytes(bytes), Some(short));
    let unread = short.unread();
    prop_assert_eq!(PlainRecord::meta_of_short(&unread, edge, n, step), Some(meta));
    let other = EdgeId { generation: edge.generation ^ 1, ..edge };
    prop_assert_eq!(PlainRecord::meta_of_short(&unread, other, n, step), None);
    prop_assert_eq!(PlainRecord::meta_of_short(&unread, edge, n ^ 1, step), None);
    prop_assert_eq!(PlainRecord::meta_of_short(&unread, edge, n, step ^ 1), None);
    let mut copy = vec![0; data.len()];
    PlainRecord::copy_of_short(&unread, &mut copy);
    prop_assert_eq!(copy, data);
    Ok(())
}

proptest! {
    #[test]
    fn no_word_of_a_short_message_is_read_twice(
        len in 0..=SHORT_MESSAGE,
        words: [u64; SHORT_WORDS],
        (edge, n, step) in (edge(), any::<u16>(), any::<u64>()),
        is_it: bool,
    ) {
        let empty = PlainRecord { edge, n, step, meta: 1, data: &[] };
        let (own, least) = (short_of(&empty).expect("it is short"), empty.encoded_len());
        let mut words = words;
        let first = if is_it { own.first } else { words[5] as u32 };
        if is_it {
            (words[0], words[1]) = (words[0] >> 48 << 48 | own.words[0] << 16 >> 16, step);
        }
        let unread = words.map(|word| std::cell::Cell::new(Some(word)));
        let word = |k: usize| unread[k].take().expect("no word is read twice");
        let message = UnreadMessage { len, first, word };
        let Some(meta) = PlainRecord::meta_of_short(&message, edge, n, step) else {
            prop_assert!(!is_it || len < least);
            return Ok(());
        };
        prop_assert_eq!(u64::from(meta), words[0] >> 48);
        let mut out = vec![0; PlainRecord::data_len(len)];
        PlainRecord::copy_of_short(&message, &mut out);
        let bytes: Vec<u8> = words[2..].iter().flat_map(|word| word.to_le_bytes()).collect();
        prop_assert_eq!(&out[..], &bytes[..out.len()]);
    }

    #[test]
    fn probes_come_back(version: u16, nonce: u64) {
        comes_back(&Message::Ping { version, nonce })?;
        comes_back(&Message::Pong { nonce })?;
    }

    #[test]
    fn messages_about_an_edge_come_back(edge in edge(), number: u64, came: u64) {
        for message in [
            Message::Need { edge, step: number },
            Message::Unneed { edge, step: number },
            Message::Retire { edge, came },
            Message::Flush { edge },
            Message::Retired { edge },
            Message::Withdraw { edge },
            Message::Release { edge },
            Message::Resumed,
            Message::EagerCredit { returned: number },
        ] {
            comes_back(&message)?;
        }
    }

    #[test]
    fn credit_comes_back(
        first in edge(), limit: u64, came: u64, held: u32, edges in 1..=EdgeCredits::MOST,
    ) {
        let credits = EdgeCredits { first, limit, came, held, edges };
        prop_assume!(credits.has_numbers());
        comes_back(&Message::Credit(credits))?;
    }

    #[test]
    fn answers_to_an_offer_come_back(
        edge in edge(), offer: u32,
        slot in 0..Slot::COUNT, generation: u8, region: u16, key: u32, offset: u64, len: u64,
    ) {
        comes_back(&Message::Decline { offer })?;
        let slot = Slot::new(slot).expect("20 bits");
        let immediate = Immediate { generation, slot };
        let target = Grant { region, key, offset, len };
        let grant = Message::Grant { offer, immediate, target };
        comes_back(&grant)?;
        comes_back(&Message::Ready { edge, immediate, target })?;
        let mut bytes = Vec::new();
        // The immediate follows type and offer.
        grant.encode(&mut bytes);
        bytes[8] |= 0x10;
        let refused = Message::decode(&bytes).expect_err("bits that are not 0").to_string();
        prop_assert!(refused.contains("as its immediate"), "{refused}");
    }

    #[test]
    fn an_announcement_comes_back(
        edge in edge(), limit: u64, resume in proptest::option::of(any::<u64>()),
        incarnation: u64, frame: u64, iteration: u64, borrow: bool, validate: bool,
        [source, destination, name] in ["[a-z:/]{0,40}", "[a-z:/]{0,40}", "[a-z\u{e4}]{0,40}"],
    ) {
        let (source, destination, name) = (&*source, &*destination, &*name);
        let name = EdgeAnnouncement {
            incarnation, frame, iteration, source, destination, name, borrow, validate,
        };
        comes_back(&Message::Announce { edge, limit, resume, name })?;
    }

    #[test]
    fn a_record_comes_back(
        edge in edge(), n: u16, step: u64, answers_need: bool, checksum: Option<u64>,
        value in value(b"bytes"),
    ) {
        let has_bytes = !matches!(value, RecordValue::Dead | RecordValue::Error(_));
        let checksum = checksum.filter(|_| has_bytes);
        comes_back(&Message::Record { edge, n, step, answers_need, checksum, value })?;
    }

    #[test]
    fn the_record_of_a_loan_comes_back_and_other_messages_are_none(
        edge in edge(), [n, meta]: [u16; 2], step: u64, checksum: Option<u64>,
        [may_borrow, answers_need]: [bool; 2], first: u32, len in 0..40_usize,
    ) {
        let record = LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum };
        let message = record.to_message();
        prop_assert!(message.len <= LentRecord::MAX_LEN);
        prop_assert_eq!(LentRecord::from_message(&message), Some(record));
        let other = ShortMessage { len, first, ..message };
        let cut = LentRecord::from_message(&ShortMessage { len, ..message });
        prop_assert_eq!(cut, (len == message.len).then_some(record));
        if let Some(read) = LentRecord::from_message(&other) {
            prop_assert_eq!((read.to_message().len, read.to_message().first), (len, first));
        }
        // A loan without its record, and a record that is no loan, are refused.
        let bytes = message.to_bytes();
        prop_assert!(Message::decode(&bytes[..message.len]).is_err());
        let plain = short_of(&PlainRecord { edge, n, step, meta, data: &[] }).expect("short");
        prop_assert_eq!(LentRecord::from_message(&plain), None);
    }

    #[test]
    fn a_plain_record_is_the_record_that_it_stands_for(
        edge in edge(), n: u16, step: u64, meta: u16, data in proptest::collection::vec(any::<u8>(), 0..40),
        other in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let plain = PlainRecord { edge, n, step, meta, data: &data };
        let value = RecordValue::Bytes { meta, data: &data };
        let record = Message::Record { edge, n, step, answers_need: false, checksum: None, value };
        let [mut short, mut long] = [Vec::new(), Vec::new()];
        plain.encode(&mut short);
        record.encode(&mut long);
        prop_assert_eq!(&short, &long);
        prop_assert_eq!(PlainRecord::decode(&short), Some(plain));
        same_as_short(&plain, &short)?;
        // Other bytes are a plain record only if they are the record that it stands for.
        let mut changed = short.clone();
        changed.iter_mut().zip(&other).take(2).for_each(|(byte, by)| *byte ^= by);
        if let Some(PlainRecord { edge, n, step, meta, data }) = PlainRecord::decode(&changed) {
            let value = RecordValue::Bytes { meta, data };
            let same = Message::Record { edge, n, step, answers_need: false, checksum: None, value };
            prop_assert_eq!(Message::decode(&changed).expect("a record"), same);
        }
    }

    #[test]
    fn errors_come_back(edge in edge(), a: u64, b: u64, status in status()) {
        let (first, last) = (a.min(b), a.max(b));
        comes_back(&Message::Refused { edge, status: status.clone() })?;
        comes_back(&Message::StepsOver { first, last, status: Some(status) })?;
        comes_back(&Message::StepsOver { first, last, status: None })?;
    }

    #[test]
    fn any_bytes_are_refused_or_come_back(
        bytes in proptest::collection::vec(any::<u8>(), 0..80), kind in 0..50_u8,
    ) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        if let Ok(message) = Message::decode(&bytes) {
            let mut again = Vec::new();
            message.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn a_long_message_survives_being_cut(
        bytes in proptest::collection::vec(any::<u8>(), 1..3000), slot in 7..300usize,
    ) {
        let mut assembler = Assembler::default();
        let mut whole = None;
        cut(&bytes, slot, |fragment| {
            assert!(is_fragment(fragment) && fragment.len() <= slot && whole.is_none());
            whole = assembler.push(fragment).expect("in order").map(<[u8]>::to_vec);
        });
        prop_assert_eq!(whole, Some(bytes));
        prop_assert!(assembler.is_idle());
    }

    #[test]
    fn any_fragments_are_refused_or_bounded(
        parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..64), 0..40),
    ) {
        let mut assembler = Assembler::default();
        for part in parts {
            if let Ok(Some(message)) = assembler.push(&part) {
                prop_assert!(message.len() <= MAX_LONG_MESSAGE);
            }
        }
    }
}

#[test]
fn meta_data_come_back() {
    let meta = TensorMeta::new(DType::F32, Shape::new(&[2, 3]).expect("a shape")).expect("meta-data");
    let meta = VersionedMeta { version: 7, placement: Placement::POOL, meta };
    comes_back(&Message::Meta(meta)).expect("the same");
}

#[test]
fn a_record_of_a_small_tensor_fits_a_cache_line_with_its_header() {
    let (edge, n) = (EdgeId { number: 1, generation: 1 }, 1);
    let value = RecordValue::Bytes { meta: 1, data: &[0; 32] };
    let record = Message::Record { edge, n, step: 1, answers_need: false, checksum: None, value };
    let mut bytes = Vec::new();
    record.encode(&mut bytes);
    assert!(bytes.len() <= 56, "{} bytes", bytes.len());
}

/// An error as its receiver gets it.
fn travelled(status: Status) -> Status {
    let edge = EdgeId { number: 1, generation: 1 };
    let mut bytes = Vec::new();
    Message::Refused { edge, status }.encode(&mut bytes);
    assert!(bytes.len() <= MAX_LONG_MESSAGE);
    let Ok(Message::Refused { status, .. }) = Message::decode(&bytes) else { panic!("no error message") };
    status
}

#[test]
fn an_error_travels_whole_up_to_the_bound_and_says_so_beyond_it() {
    let whole =
        Status::new(Code::Internal, "x".repeat(MAX_STATUS_TEXT)).with_details(vec![0; MAX_STATUS_TEXT]);
    assert!(travelled(whole.clone()) == whole);
    let long = "é".repeat(MAX_STATUS_TEXT);
    let cut = travelled(Status::new(Code::Internal, long.clone()).with_details(vec![7; 9000]));
    assert!(cut.message.len() > MAX_STATUS_TEXT - 64 && cut.message.ends_with("é [cut from 524288 bytes]"));
    assert_eq!(cut.details, [7; 9000]);
    let note = " [262145 bytes of details were left out: 262144 travel at most]";
    let endless = vec![7; MAX_STATUS_TEXT + 1];
    let without = travelled(Status::new(Code::Internal, "short").with_details(endless.clone()));
    assert!(without.details.is_empty() && without.message == format!("short{note}"));
    let neither = travelled(Status::new(Code::Internal, long).with_details(endless));
    assert!(
        neither.details.is_empty() && neither.message.ends_with(&format!("é{note} [cut from 524288 bytes]"))
    );
}

#[test]
fn fragments_out_of_order_are_refused() {
    let mut fragments = Vec::new();
    cut(&[1; 50], 20, |fragment| fragments.push(fragment.to_vec()));
    let mut assembler = Assembler::default();
    assert_eq!(assembler.push(&fragments[1]), Err(FragmentError::Order));
    assert_eq!(assembler.push(&fragments[0]), Ok(None));
    assert_eq!(assembler.push(&fragments[0]), Err(FragmentError::Order));
}

#[test]
fn steps_that_end_before_they_begin_are_refused() {
    let refused = |first, last| {
        let mut bytes = Vec::new();
        Message::StepsOver { first, last, status: None }.encode(&mut bytes);
        Message::decode(&bytes).is_err()
    };
    assert!(refused(6, 5) && refused(u64::MAX, 0) && !refused(5, 5) && !refused(0, u64::MAX));
}

#[test]
fn credit_of_no_edge_of_too_many_and_beyond_the_last_number_is_refused() {
    let most = EdgeCredits::MOST;
    for (number, edges, field, value) in [
        (1, 0, "edges", 0),
        (1, most + 1, "edges", u64::from(most) + 1),
        (1, u8::MAX, "edges", u8::MAX.into()),
        (u32::MAX - 1, 3, "first edge", u64::from(u32::MAX) - 1),
    ] {
        let first = EdgeId { number, generation: 2 };
        let mut bytes = Vec::new();
        Message::Credit(EdgeCredits { first, limit: 3, came: 1, held: 0, edges }).encode(&mut bytes);
        assert_eq!(Message::decode(&bytes), Err(MessageError::Value { kind: CREDIT, field, value }));
    }
}

#[test]
fn an_endless_message_is_refused_by_its_announcement() {
    let announced = (MAX_LONG_MESSAGE as u32 + 1).to_le_bytes();
    let fragment = [&[FRAGMENT, 1], &announced[..], &[0]].concat();
    let error = Assembler::default().push(&fragment).expect_err("too long");
    assert_eq!(error, FragmentError::TooLong { total: MAX_LONG_MESSAGE as u32 + 1 });
}

#[test]
fn lengths_of_more_than_32_bits_come_back() {
    let len = (5 << 32) + 1;
    let target = Grant { region: 3, key: 4, offset: 1 << 41, len };
    let immediate = Immediate { generation: 2, slot: Slot::new(1).expect("20 bits") };
    let meta = TensorMeta::new(DType::U8, Shape::new(&[len]).expect("shape")).expect("meta");
    assert_eq!(meta.bytes(), len);
    let meta = VersionedMeta { version: 5, placement: Placement::POOL, meta };
    for message in [Message::Grant { offer: 1, immediate, target }, Message::Meta(meta)] {
        comes_back(&message).expect("the same");
    }
}

#[test]
fn meta_data_of_strings_carries_the_length_of_their_serialised_form() {
    let meta = TensorMeta::serialized(DType::String, Shape::new(&[2]).expect("shape"), 0x0102).expect("meta");
    let mut bytes = Vec::new();
    Message::Meta(VersionedMeta { version: 1, placement: Placement::POOL, meta }).encode(&mut bytes);
    let (rest, length) = bytes.split_last_chunk::<8>().expect("a length");
    assert_eq!(*length, 0x0102u64.to_le_bytes());
    let short = Message::decode(rest).expect_err("cut");
    assert!(short.to_string().contains("serialised length"), "{short}");
    let too_long = [rest, &(1u64 << 63).to_le_bytes()].concat();
    assert!(matches!(Message::decode(&too_long), Err(MessageError::Shape { .. })));
}
