use super::fragment::{Assembler, FragmentError, cut, is_fragment};
use super::*;
use crate::wire::{Code, DType, Shape};
use proptest::prelude::*;

fn request_id() -> impl Strategy<Value = RequestId> {
    (0..Slot::COUNT, any::<u8>())
        .prop_map(|(slot, generation)| RequestId { slot: Slot::new(slot).expect("20 bits"), generation })
}

fn grant() -> impl Strategy<Value = Grant> {
    (any::<u16>(), any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(region, key, offset, len)| Grant {
        region,
        key,
        offset,
        len,
    })
}

fn meta() -> impl Strategy<Value = VersionedMeta> {
    let placement = (any::<bool>(), 0..3u8).prop_map(|(on_host, allocator)| Placement {
        on_host,
        allocator: [Allocator::Pool, Allocator::Heap, Allocator::Peer][usize::from(allocator)],
    });
    let dims = prop_oneof![
        proptest::collection::vec(0..1000u64, 0..6),
        proptest::collection::vec(1..2u64, 0..=254),
    ];
    let len = 0..=i64::MAX as u64;
    (1..u32::MAX, placement, 0..DType::ALL.len(), dims, len).prop_map(
        |(version, placement, dtype, dims, len)| {
            let (dtype, shape) = (DType::ALL[dtype], Shape::new(&dims).expect("shape"));
            let meta = match dtype.size() {
                Some(_) => TensorMeta::new(dtype, shape),
                None => TensorMeta::serialized(dtype, shape, len),
            };
            VersionedMeta { version, placement, meta: meta.expect("meta") }
        },
    )
}

fn meta_ref() -> impl Strategy<Value = MetaRef> {
    prop_oneof![any::<u32>().prop_map(MetaRef::Cached), meta().prop_map(MetaRef::New)]
}

fn tensor_request() -> impl Strategy<Value = TensorRequest> {
    let numbers = (any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
    (request_id(), numbers, any::<(bool, bool)>(), proptest::option::of(grant())).prop_map(
        |(request, (route, step, frame, iteration, meta_version, timeout_ms), (borrow, validate), grant)| {
            TensorRequest {
                request,
                route,
                step,
                frame,
                iteration,
                meta_version,
                timeout_ms,
                borrow,
                validate,
                grant,
            }
        },
    )
}

fn armed_step() -> impl Strategy<Value = StandingStep> {
    (request_id(), any::<u32>(), any::<u64>()).prop_map(|(request, key, offset)| StandingStep {
        request,
        key,
        offset,
    })
}

fn bytes_of(steps: &[StandingStep], granted: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    steps.iter().for_each(|step| step.put(&mut bytes, granted));
    bytes
}

fn comes_back(message: &Message<'_>) -> Result<(), TestCaseError> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    prop_assert!(bytes.len() <= MAX_LONG_MESSAGE);
    prop_assert_eq!(&Message::decode(&bytes).expect("own message"), message);
    for end in 0..bytes.len() {
        let whole = matches!(message, Message::Response { .. });
        prop_assert!(whole || Message::decode(&bytes[..end]).is_err(), "cut at {}", end);
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_request_comes_back(request in tensor_request()) {
        comes_back(&Message::Request(request))?;
    }

    #[test]
    fn meta_data_comes_back(request in request_id(), follows in 0..3usize, meta in meta()) {
        let follows = [Follows::ReRequest, Follows::Loan, Follows::Write][follows];
        comes_back(&Message::Meta { request, follows, meta })?;
    }

    #[test]
    fn standing_requests_come_back(
        route: u32, first_step in 0..u64::MAX - 256, iteration: u64, version: u32,
        borrow: bool, validate: bool, room in proptest::option::of((any::<u16>(), any::<u64>())),
        steps in proptest::collection::vec(armed_step(), 1..=MAX_STANDING_STEPS),
    ) {
        let bytes = bytes_of(&steps, room.is_some());
        let list = StandingSteps::new(&bytes, room.is_some());
        let (frame, meta_version) = (!iteration, version);
        let standing = StandingRequest {
            route, first_step, frame, iteration, meta_version, borrow, validate, room, steps: list,
        };
        let mut bytes = Vec::new();
        Message::StandingRequest(standing.clone()).encode(&mut bytes);
        prop_assert!(bytes.len() <= MAX_LONG_MESSAGE);
        let decoded = Message::decode(&bytes).expect("own message");
        prop_assert_eq!(&decoded, &Message::StandingRequest(standing.clone()));
        // A message that is cut between two steps has fewer steps. One that is cut elsewhere is
        // refused.
        for end in 0..bytes.len() {
            if let Ok(Message::StandingRequest(cut)) = Message::decode(&bytes[..end]) {
                prop_assert!(cut.steps.len() < steps.len());
            }
        }
        let back: Vec<_> = standing.steps.iter().collect();
        for (step, back) in steps.iter().zip(&back) {
            let granted = room.map(|(region, len)| Grant { region, key: step.key, offset: step.offset, len });
            prop_assert_eq!((back.request, standing.grant(back)), (step.request, granted));
        }
        prop_assert_eq!(back.len(), steps.len());
    }

    #[test]
    fn a_response_comes_back_with_the_length_that_was_foretold(
        request in request_id(), meta in meta_ref(), data in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let foretold = meta.response_len(data.len());
        let message = Message::Response { request, meta, data: &data };
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), foretold);
        comes_back(&message)?;
    }

    #[test]
    fn a_route_comes_back(
        number: u32, incarnation: u64, source: String, destination: String, edge in ".{0,2000}",
    ) {
        prop_assume!(edge.len() <= 2048);
        let (source, destination, edge) = (&source[..], &destination[..], &edge[..]);
        comes_back(&Message::Route { number, incarnation, source, destination, edge })?;
    }

    #[test]
    fn short_messages_come_back(request in request_id(), grant in grant(), nonce: u64, version: u16) {
        comes_back(&Message::Ping { version, nonce })?;
        comes_back(&Message::Pong { nonce })?;
        comes_back(&Message::RouteDrop { number: version.into() })?;
        comes_back(&Message::ReRequest { request, grant })?;
        comes_back(&Message::Cancel { request })?;
        comes_back(&Message::CancelAck { request })?;
    }

    #[test]
    fn a_return_and_its_answer_come_back(
        request in request_id(), route: u32, step: u64, iteration: u64, stash_id: u32,
    ) {
        comes_back(&Message::Return { request, route, step, frame: step ^ iteration, iteration, stash_id })?;
        comes_back(&Message::Stashed { request, stash_id })?;
        comes_back(&Message::Checksum { request, checksum: step })?;
    }

    #[test]
    fn an_error_comes_back_whole(
        request in request_id(), code in 1..17u8, message: String, derived: bool,
        details in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let code = Code::from_number(code).expect("known");
        comes_back(&Message::Error { request, status: Status { code, message, details, derived } })?;
    }

    #[test]
    fn any_bytes_are_refused_or_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(message) = Message::decode(&bytes) {
            let mut again = Vec::new();
            message.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn a_flipped_byte_never_panics(request in tensor_request(), at: prop::sample::Index, flip in 1..=255u8) {
        let mut bytes = Vec::new();
        Message::Request(request).encode(&mut bytes);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        let _ = Message::decode(&bytes);
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

/// An error as its receiver gets it.
fn travelled(status: Status) -> Status {
    let request = RequestId { slot: Slot::new(1).expect("fits"), generation: 0 };
    let mut bytes = Vec::new();
    Message::Error { request, status }.encode(&mut bytes);
    assert!(bytes.len() <= MAX_LONG_MESSAGE);
    let Ok(Message::Error { status, .. }) = Message::decode(&bytes) else { panic!("no error message") };
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
fn an_endless_message_is_refused_by_its_announcement() {
    let announced = (MAX_LONG_MESSAGE as u32 + 1).to_le_bytes();
    let fragment = [&[FRAGMENT, 1], &announced[..], &[0]].concat();
    let error = Assembler::default().push(&fragment).expect_err("too long");
    assert_eq!(error, FragmentError::TooLong { total: MAX_LONG_MESSAGE as u32 + 1 });
}

#[test]
fn lengths_of_more_than_32_bits_come_back() {
    let len = (5 << 32) + 1;
    let request = RequestId { slot: Slot::new(1).expect("20 bits"), generation: 2 };
    let grant = Grant { region: 3, key: 4, offset: 1 << 41, len };
    let meta = TensorMeta::new(DType::U8, Shape::new(&[len]).expect("shape")).expect("meta");
    assert_eq!(meta.bytes(), len);
    let meta = VersionedMeta { version: 5, placement: Placement::POOL, meta };
    for message in
        [Message::ReRequest { request, grant }, Message::Meta { request, follows: Follows::Loan, meta }]
    {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        assert_eq!(Message::decode(&bytes), Ok(message));
    }
}

/// The bytes of a `STANDING_REQUEST` for `steps` steps from `first_step` on.
fn arm_bytes(first_step: u64, count: usize, room: Option<(u16, u64)>) -> Vec<u8> {
    let request = RequestId { slot: Slot::new(1).expect("fits"), generation: 0 };
    let list = bytes_of(&vec![StandingStep { request, key: 1, offset: 2 }; count], room.is_some());
    let mut bytes = vec![STANDING_REQUEST, if room.is_some() { FLAG_GRANT } else { 0 }, 1, 0, 0, 0];
    [first_step, 0, 0].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend([0; 4]);
    if let Some((region, len)) = room {
        bytes.extend(region.to_le_bytes());
        bytes.extend(len.to_le_bytes());
    }
    bytes.extend(list);
    bytes
}

#[test]
fn standing_requests_are_refused_field_by_field() {
    let room = Some((0, 8));
    assert!(Message::decode(&arm_bytes(u64::MAX, 1, room)).is_ok(), "the last step of all");
    let flags = {
        let mut bytes = arm_bytes(0, 1, None);
        bytes[1] = 8;
        bytes
    };
    let slot = {
        let mut bytes = arm_bytes(0, 2, None);
        let last = bytes.len() - 1;
        bytes[last] = 0x10;
        bytes
    };
    let cut = {
        let mut bytes = arm_bytes(0, 2, room);
        bytes.pop();
        bytes
    };
    for (bytes, part) in [
        (flags, "8 as its flags"),
        (slot, "as its request"),
        (cut, "in its steps"),
        (arm_bytes(0, 0, room), "in its steps"),
        (arm_bytes(0, MAX_STANDING_STEPS + 1, room), "257 as its number of steps"),
        (arm_bytes(u64::MAX, 2, room), "2 as its number of steps"),
        (arm_bytes(0, 0, None)[..20].to_vec(), "in its frame"),
    ] {
        let error = Message::decode(&bytes).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn half_a_window_of_sixteen_with_destinations_fits_a_control_slot() {
    assert!(arm_bytes(0, 10, Some((0, 8))).len() <= 224);
}

#[test]
fn meta_data_of_strings_carries_the_length_of_their_serialised_form() {
    let request = RequestId { slot: Slot::new(3).expect("20 bits"), generation: 1 };
    let meta = TensorMeta::serialized(DType::String, Shape::new(&[2]).expect("shape"), 0x0102).expect("meta");
    let mut bytes = Vec::new();
    let meta = VersionedMeta { version: 1, placement: Placement::POOL, meta };
    Message::Meta { request, follows: Follows::ReRequest, meta }.encode(&mut bytes);
    let (rest, length) = bytes.split_last_chunk::<8>().expect("a length");
    assert_eq!(*length, 0x0102u64.to_le_bytes());
    let short = Message::decode(rest).expect_err("cut");
    assert!(short.to_string().contains("serialised length"), "{short}");
    let too_long = [rest, &(1u64 << 63).to_le_bytes()].concat();
    assert!(matches!(Message::decode(&too_long), Err(MessageError::Shape { .. })));
}
