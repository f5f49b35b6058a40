//! The other side, which the input controls.

use crate::input::Input;
use crate::requests::request;
use crate::{DEPTH, OWNER, PEER};
use tensorwire::internals::fabric::sim::{SimLink, SimPort};
use tensorwire::internals::fabric::{Completions, Event, LinkFailure, LinkId, LoanPermit, Port};
use tensorwire::internals::memory::LentBytes;
use tensorwire::internals::wire::message::fragment::{Assembler, cut, is_fragment};
use tensorwire::internals::wire::message::pack::{Pack, is_packed, unpack};
use tensorwire::internals::wire::message::{
    Follows, MAX_LONG_MESSAGE, Message, MetaRef, Placement, RequestId, StandingRequest, StandingStep,
    StandingSteps, TensorRequest, VERSION, VersionedMeta,
};
use tensorwire::internals::wire::{
    Grant, Immediate, ImmediateKind, MetaSlot, ShortMessage, Slot, checksum_of,
};
use tensorwire::{Code, DType, Pool, Shape, Status, Tensor, TensorMeta};

/// Bytes of a message that travels whole.
const SLOT: usize = 224;
/// Largest number of remembered items of each kind.
const MEMORY: usize = 16;

/// A peer that keeps to no rule but those of the fabric.
pub struct Peer {
    port: SimPort,
    link: LinkId,
    completions: Completions,
    assembler: Assembler,
    /// Whether it reads messages, answers pings and returns credits.
    is_attentive: bool,
    /// The open pack, which collects its messages.
    pack: Option<Pack>,
    consumed: u32,
    /// The owner's requests and grants.
    requests: Vec<RequestId>,
    grants: Vec<Grant>,
    tensor: Tensor,
    loans: Vec<LentBytes>,
    /// Of the bytes that it sent last.
    checksum: u64,
}

impl Peer {
    pub fn new(mut port: SimPort, link: SimLink, pool: Pool) -> Self {
        let link = port.attach(link).expect("room");
        port.post_receives(link, DEPTH);
        let meta = TensorMeta::new(DType::U8, Shape::new(&[256]).expect("a shape")).expect("small");
        let mut tensor = pool.zeroed(meta).expect("room");
        tensor.bytes_mut().fill(2);
        Peer {
            port,
            link,
            completions: Completions::with_capacity(16),
            assembler: Assembler::default(),
            is_attentive: true,
            pack: None,
            consumed: 0,
            requests: Vec::new(),
            grants: Vec::new(),
            tensor: tensor.freeze(),
            loans: Vec::new(),
            checksum: 0,
        }
    }

    pub fn act(&mut self, command: u8, input: &mut Input<'_>) {
        match command {
            0 => self.say_bytes(input.bytes()),
            1 => self.route(input),
            2 | 3 => self.ask(input),
            4 => self.ask_again(input),
            5 => self.meta(input),
            6 => self.respond(input),
            7 => self.short_word(input),
            8 => self.give_back(input),
            9 => self.error(input),
            10 | 11 => self.write(input),
            12 => self.lend(input),
            13 => self.immediate(input),
            14 => self.port.publish_credits(self.link, input.number() as u32),
            _ => self.change(input),
        }
    }

    fn change(&mut self, input: &mut Input<'_>) {
        match input.below(7) {
            0 => self.is_attentive = !self.is_attentive,
            1 => self.loans.clear(),
            2 => self.port.post_receives(self.link, input.u8().into()),
            3 => self.make_standing_request(input),
            4 if input.u8() > 200 => self.port.fail(self.link, LinkFailure::Closed),
            5 => self.pack_or_unpack(),
            _ => self.say(&Message::Pong { nonce: 1 ^ 2u64.rotate_left(32) }),
        }
    }

    fn say(&mut self, message: &Message<'_>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.say_bytes(&bytes);
    }

    /// Begins a pack, or sends the open one.
    fn pack_or_unpack(&mut self) {
        match self.pack.take() {
            Some(pack) => self.say_bytes(pack.bytes()),
            None => self.pack = Some(Pack::new(SLOT)),
        }
    }

    /// A full queue or a link that is down swallows it.
    fn say_bytes(&mut self, bytes: &[u8]) {
        if let Some(pack) = &mut self.pack
            && !bytes.is_empty()
            && pack.has_room(bytes.len())
        {
            return pack.push(bytes);
        }
        let (port, link) = (&mut self.port, self.link);
        if bytes.len() <= SLOT {
            let _ = port.send(link, bytes);
        } else {
            cut(bytes, SLOT, |part| {
                let _ = port.send(link, part);
            });
        }
    }

    fn route(&mut self, input: &mut Input<'_>) {
        let devices = [OWNER, PEER, "nonsense", "/job:a/replica:1/task:0/device:CPU:0"];
        let long = "n".repeat(input.u8().into());
        let edges = ["x", "y", ";", long.as_str()];
        let [source, destination, edge] = [0, 1, 2].map(|_| input.below(8));
        let message = Message::Route {
            number: input.number() as u32,
            incarnation: if input.u8() < 200 { 1 } else { input.number() },
            source: devices.get(source).unwrap_or(&OWNER),
            destination: devices.get(destination).unwrap_or(&PEER),
            edge: edges.get(edge).unwrap_or(&"x"),
        };
        self.say(&message);
        if input.u8() > 240 {
            self.say(&Message::RouteDrop { number: input.number() as u32 });
        }
    }

    fn ask(&mut self, input: &mut Input<'_>) {
        let request = TensorRequest {
            request: request(input, &[]),
            route: input.number() as u32,
            step: input.number(),
            frame: input.number() % 2,
            iteration: 0,
            meta_version: input.number() as u32,
            timeout_ms: u32::MAX,
            borrow: input.flag(),
            validate: input.flag(),
            grant: if input.flag() { Some(self.grant(input)) } else { None },
        };
        self.say(&Message::Request(request));
    }

    fn make_standing_request(&mut self, input: &mut Input<'_>) {
        let room = if input.flag() { Some((input.number() as u16, input.number())) } else { None };
        let mut steps = Vec::new();
        for _ in 0..=input.below(20) {
            let Grant { key, offset, .. } = self.grant(input);
            StandingStep { request: request(input, &[]), key, offset }.put(&mut steps, room.is_some());
        }
        let standing = StandingRequest {
            route: input.number() as u32,
            first_step: input.number(),
            frame: input.number() % 2,
            iteration: 0,
            meta_version: input.number() as u32,
            borrow: input.flag(),
            validate: input.flag(),
            room,
            steps: StandingSteps::new(&steps, room.is_some()),
        };
        self.say(&Message::StandingRequest(standing));
    }

    fn ask_again(&mut self, input: &mut Input<'_>) {
        let message = Message::ReRequest { request: request(input, &[]), grant: self.grant(input) };
        self.say(&message);
    }

    /// A grant: one of the owner's, changed or not, or any.
    fn grant(&mut self, input: &mut Input<'_>) -> Grant {
        let known = match self.grants.len() {
            0 => Grant { region: 0, key: 0, offset: 0, len: 0 },
            count => self.grants[input.below(count)],
        };
        match input.u8() {
            0..=127 => known,
            128..=191 => Grant { len: u64::from(input.u8()), ..known },
            192..=223 => Grant { offset: known.offset.wrapping_add(input.number()), ..known },
            _ => Grant {
                region: input.number() as u16,
                key: input.number() as u32,
                offset: input.number(),
                len: input.number(),
            },
        }
    }

    fn any_meta(&mut self, input: &mut Input<'_>) -> VersionedMeta {
        let dtype = [DType::U8, DType::F32, DType::Bool, DType::String][input.below(4)];
        let dims: Vec<u64> = (0..input.below(4)).map(|_| input.number()).collect();
        let shape = Shape::new(&dims).unwrap_or(Shape::SCALAR);
        let meta = match dtype.size() {
            Some(_) => TensorMeta::new(dtype, shape),
            None => TensorMeta::serialized(dtype, shape, input.number()),
        };
        let meta = meta.unwrap_or_else(|_| self.tensor.meta().clone());
        let placement = [Placement::POOL, Placement::BORROWED][input.below(2)];
        VersionedMeta { version: (input.number() as u32).max(1), placement, meta }
    }

    fn meta(&mut self, input: &mut Input<'_>) {
        let request = request(input, &self.requests);
        let meta = if input.flag() {
            VersionedMeta { version: 1, placement: Placement::POOL, meta: self.tensor.meta().clone() }
        } else {
            self.any_meta(input)
        };
        let follows = [Follows::ReRequest, Follows::Loan, Follows::Write][input.below(3)];
        self.say(&Message::Meta { request, follows, meta });
    }

    fn respond(&mut self, input: &mut Input<'_>) {
        let request = request(input, &self.requests);
        let (meta, size) = match input.flag() {
            true => (MetaRef::Cached(input.number() as u32), input.u8().into()),
            false => {
                let meta = self.any_meta(input);
                let size = meta.meta.bytes().min(5000) as usize;
                (MetaRef::New(meta), size)
            }
        };
        let data = vec![input.u8(); size];
        self.checksum = checksum_of(&data);
        self.say(&Message::Response { request, meta, data: &data });
    }

    fn short_word(&mut self, input: &mut Input<'_>) {
        let known = request(input, &self.requests);
        let any = request(input, &[]);
        let message = match input.below(7) {
            0 => Message::CancelAck { request: known },
            1 => Message::Cancel { request: any },
            2 => Message::Stashed { request: known, stash_id: input.number() as u32 },
            3 => Message::Ping { version: VERSION, nonce: input.number() },
            4 => Message::RouteDrop { number: input.number() as u32 },
            5 if input.flag() => Message::Checksum { request: known, checksum: self.checksum },
            5 => Message::Checksum { request: known, checksum: input.number() },
            _ => Message::Cancel { request: known },
        };
        self.say(&message);
    }

    fn give_back(&mut self, input: &mut Input<'_>) {
        let message = Message::Return {
            request: request(input, &[]),
            route: input.number() as u32,
            step: input.number(),
            frame: input.number() % 2,
            iteration: 0,
            stash_id: input.number() as u32,
        };
        self.say(&message);
    }

    fn error(&mut self, input: &mut Input<'_>) {
        let code = [Code::NotFound, Code::Aborted, Code::Internal][input.below(3)];
        let mut status = Status::new(code, "e".repeat(input.below(250) * 40));
        status.derived = input.flag();
        status.details = input.bytes().to_vec();
        let request = request(input, &self.requests);
        self.say(&Message::Error { request, status });
    }

    /// An immediate's bits for a request of the owner.
    fn any_immediate(&mut self, input: &mut Input<'_>, kind: ImmediateKind) -> Immediate {
        let RequestId { slot, generation } = request(input, &self.requests);
        let place = MetaSlot::of(input.below(4) as u32);
        let kinds = [
            ImmediateKind::Plain,
            ImmediateKind::Dead,
            ImmediateKind::Stripe,
            ImmediateKind::Lend,
            ImmediateKind::PlainAs(place),
            ImmediateKind::LendAs(place),
        ];
        let kind = if input.u8() < 200 { kind } else { kinds[input.below(kinds.len())] };
        Immediate { kind, generation, slot }
    }

    fn write(&mut self, input: &mut Input<'_>) {
        let target = self.grant(input);
        let len = target.len.min(256);
        let immediate = self.any_immediate(input, ImmediateKind::Plain);
        let tensor = self.tensor.clone();
        let has_immediate = input.u8() < 200;
        self.checksum = checksum_of(&tensor.bytes()[..len as usize]);
        let _ = self.port.write(self.link, &tensor, len, &target, has_immediate.then_some(immediate));
    }

    fn lend(&mut self, input: &mut Input<'_>) {
        let immediate = self.any_immediate(input, ImmediateKind::Lend);
        let message = ShortMessage::from_u32(immediate.to_bits());
        let tensor = self.tensor.clone();
        let mut permit = Some(LoanPermit::unbounded());
        self.checksum = checksum_of(tensor.bytes());
        let _ = self.port.lend(self.link, &mut Some(tensor.clone()), &mut permit, &message);
    }

    fn immediate(&mut self, input: &mut Input<'_>) {
        let immediate = self.any_immediate(input, ImmediateKind::Dead);
        let target = Grant { region: 0, key: 0, offset: 0, len: 0 };
        let _ = self.port.write_inline(self.link, &[], &target, Some(immediate));
    }

    /// Reads arrived messages, if it reads at all.
    pub fn poll(&mut self) -> usize {
        if !self.is_attentive {
            return 0;
        }
        let count = self.port.poll(&mut self.completions);
        let mut messages = Vec::new();
        for (completion, bytes) in self.completions.drain() {
            match completion.event {
                Event::Message(_) => messages.push(bytes.to_vec()),
                Event::Immediate { .. } => messages.push(Vec::new()),
                Event::Lent { bytes, .. } => {
                    self.loans.push(bytes);
                    messages.push(Vec::new());
                }
                _ => {}
            }
        }
        self.completions.clear();
        for message in &messages {
            self.consumed = self.consumed.wrapping_add(1);
            self.port.post_receives(self.link, 1);
            self.hear(message);
        }
        if !messages.is_empty() {
            self.port.publish_credits(self.link, self.consumed);
        }
        count
    }

    fn hear(&mut self, bytes: &[u8]) {
        if is_packed(bytes) {
            let messages = unpack(bytes).expect("the owner's packs are whole");
            return messages.for_each(|message| self.hear(message));
        }
        let mut assembler = std::mem::take(&mut self.assembler);
        let whole = match is_fragment(bytes) {
            true => assembler.push(bytes).expect("the owner's fragments are in order"),
            false => Some(bytes).filter(|bytes| !bytes.is_empty()),
        };
        if let Some(whole) = whole {
            assert!(whole.len() <= MAX_LONG_MESSAGE);
            self.remember(&Message::decode(whole).expect("the owner's messages are whole"));
        }
        self.assembler = assembler;
    }

    fn remember(&mut self, message: &Message<'_>) {
        match message {
            Message::Ping { nonce, .. } => self.say(&Message::Pong { nonce: *nonce }),
            Message::Request(request) => self.note(request.request, request.grant),
            Message::ReRequest { request, grant } => self.note(*request, Some(*grant)),
            Message::StandingRequest(standing) => {
                standing.steps.iter().for_each(|step| self.note(step.request, standing.grant(&step)))
            }
            _ => {}
        }
    }

    fn note(&mut self, request: RequestId, grant: Option<Grant>) {
        assert!(request.slot < Slot::new(64).expect("20 bits"), "as many slots as requests");
        if self.requests.len() == MEMORY {
            self.requests.remove(0);
        }
        self.requests.push(request);
        if self.grants.len() == MEMORY {
            self.grants.remove(0);
        }
        self.grants.extend(grant);
    }
}
