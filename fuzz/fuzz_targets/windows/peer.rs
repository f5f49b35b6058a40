//! The other side of the node's link, which the input controls.

use crate::input::Input;
use crate::{DEPTH, DEVICES, HOSTILE, NODE};
use std::collections::BTreeMap;
use tensorwire::internals::fabric::sim::{SimFabric, SimLink, SimPort};
use tensorwire::internals::fabric::{
    Completions, Event, Fabric, LinkFailure, LinkId, LoanPermit, Port, PostError,
};
use tensorwire::internals::memory::LentBytes;
use tensorwire::internals::wire::message::fragment::{Assembler, cut, is_fragment};
use tensorwire::internals::wire::message::pack::{Pack, is_packed, unpack};
use tensorwire::internals::wire::message::{
    EdgeAnnouncement, EdgeCredits, LentRecord, Message, Placement, RecordValue, VersionedMeta,
};
use tensorwire::internals::wire::{EdgeId, Grant, Immediate, SHORT_MESSAGE, ShortMessage, Slot, checksum_of};
use tensorwire::{Code, DType, Pool, Shape, Status, Tensor, TensorMeta};

/// Bytes of a message that travels whole.
const SLOT: usize = 224;
/// Numbers of the metas that the peer tells at the start: of so many elements of one byte.
const SIZES: [u64; 4] = [0, 8, 100, 1000];
/// Attempts to post an answer.
const MAX_TRIES: u32 = 100;
/// Repetitions of a message at most.
const MAX_FLOOD: usize = 64;

/// A peer that keeps to no rule but those of the fabric.
pub struct Peer {
    fabric: SimFabric,
    port: SimPort,
    link: Option<LinkId>,
    completions: Completions,
    assembler: Assembler,
    /// Whether it reads messages, answers pings and returns credits.
    is_attentive: bool,
    /// The open pack, which collects its messages.
    pack: Option<Pack>,
    consumed: u32,
    /// The numbers that the node has given to its edges, with the values that were sent there.
    to_node: BTreeMap<u32, (u16, u16)>,
    /// The numbers that the peer has given to its edges, with the limit it has announced.
    from_node: BTreeMap<u32, (u16, u64)>,
    /// Edges and steps whose values the node needs.
    needs: Vec<(EdgeId, u64)>,
    /// Tensors that the node has offered.
    offers: Vec<u32>,
    /// Destinations that the node has granted.
    granted: Vec<(Immediate, Grant)>,
    has_told_metas: bool,
    last: Vec<u8>,
    tensors: Vec<Tensor>,
    loans: Vec<LentBytes>,
}

impl Peer {
    pub fn new(fabric: SimFabric, pool: Pool) -> Self {
        let tensor = |size: &u64| {
            let meta = TensorMeta::new(DType::U8, Shape::new(&[*size]).expect("a shape")).expect("small");
            let mut tensor = pool.zeroed(meta).expect("room");
            tensor.bytes_mut().fill(2);
            tensor.freeze()
        };
        Peer {
            port: fabric.port().expect("a port"),
            fabric,
            link: None,
            completions: Completions::with_capacity(16),
            assembler: Assembler::default(),
            is_attentive: true,
            pack: None,
            consumed: 0,
            to_node: BTreeMap::new(),
            from_node: BTreeMap::new(),
            needs: Vec::new(),
            offers: Vec::new(),
            granted: Vec::new(),
            has_told_metas: false,
            last: Vec::new(),
            tensors: SIZES.iter().map(tensor).collect(),
            loans: Vec::new(),
        }
    }

    pub fn fabric(&self) -> &SimFabric {
        &self.fabric
    }

    /// Takes a new link instead of the one before.
    pub fn attach(&mut self, link: SimLink) {
        if let Some(old) = self.link.take() {
            self.port.detach(old);
        }
        let link = self.port.attach(link).expect("room");
        self.port.post_receives(link, DEPTH);
        self.link = Some(link);
        (self.assembler, self.pack, self.consumed) = (Assembler::default(), None, 0);
        (self.is_attentive, self.has_told_metas) = (true, false);
        (self.to_node, self.from_node) = (BTreeMap::new(), BTreeMap::new());
        self.needs.clear();
        self.offers.clear();
        self.granted.clear();
    }

    /// Ends the link.
    pub fn leave(&mut self) {
        if let Some(link) = self.link.take() {
            self.port.fail(link, LinkFailure::Closed);
            self.port.detach(link);
        }
        self.loans.clear();
    }

    pub fn act(&mut self, command: u8, input: &mut Input<'_>) {
        match command {
            0 => self.say_bytes(input.bytes()),
            1 | 2 => self.announce(input),
            3 => self.credit(input),
            4 | 5 => self.need(input),
            6 => self.retire(input),
            7 => self.meta(input),
            8..=11 => self.record(input),
            12 => self.answer(input),
            13 => self.end(input),
            14 => self.lend(input),
            15 => self.disturb(input),
            16 => self.flood(input),
            17 => self.write_to_grant(input),
            18 => self.answer_offer(input),
            19 => self.make_ready(input),
            _ => self.change(input),
        }
    }

    fn change(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.link else { return };
        match input.below(6) {
            0 => self.is_attentive = !self.is_attentive,
            1 => self.loans.clear(),
            2 => self.port.post_receives(link, input.u8().into()),
            3 => self.port.publish_credits(link, input.number() as u32),
            4 if input.u8() > 200 => self.port.fail(link, LinkFailure::Closed),
            _ => self.pack_or_unpack(),
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
        self.last = bytes.to_vec();
        if let Some(pack) = &mut self.pack
            && !bytes.is_empty()
            && pack.has_room(bytes.len())
        {
            return pack.push(bytes);
        }
        let Some(link) = self.link else { return };
        let port = &mut self.port;
        if bytes.len() <= SLOT {
            let _ = port.send(link, bytes);
        } else {
            cut(bytes, SLOT, |part| {
                let _ = port.send(link, part);
            });
        }
    }

    fn flood(&mut self, input: &mut Input<'_>) {
        let bytes = std::mem::take(&mut self.last);
        (0..input.below(MAX_FLOOD)).for_each(|_| self.say_bytes(&bytes));
    }

    /// An edge that the peer receives on: one that it has announced, or any.
    fn own_edge(&mut self, input: &mut Input<'_>) -> EdgeId {
        edge_of(&self.from_node.iter().map(|(number, (of, _))| (*number, *of)).collect::<Vec<_>>(), input)
    }

    fn announce(&mut self, input: &mut Input<'_>) {
        let long = "n".repeat(input.u8().into());
        let names = ["x", "y", "z", long.as_str(), ";"];
        let name = names[input.below(20) % names.len()];
        let [source, destination] = match input.u8() {
            0..=230 => [DEVICES[NODE], DEVICES[HOSTILE]],
            231..=240 => [DEVICES[HOSTILE], DEVICES[NODE]],
            _ => ["nonsense", "/job:a/replica:1/task:0/device:CPU:0"],
        };
        let number = match input.u8() {
            0..=200 => self.from_node.keys().next_back().map_or(0, |last| last.wrapping_add(1)),
            _ => input.number() as u32,
        };
        let edge = EdgeId { number, generation: input.number() as u16 };
        let limit = input.number();
        if number < 1 << 15 {
            self.from_node.insert(number, (edge.generation, limit));
        }
        let resume = if input.u8() > 250 { Some(input.number()) } else { None };
        let name = EdgeAnnouncement {
            incarnation: if input.u8() < 240 { 1 } else { input.number() },
            frame: u64::from(input.u8() > 240),
            iteration: 0,
            source,
            destination,
            name,
            borrow: input.flag(),
            validate: input.flag(),
        };
        self.say(&Message::Announce { edge, limit, resume, name });
    }

    fn credit(&mut self, input: &mut Input<'_>) {
        let edge = self.own_edge(input);
        let limit = match self.from_node.get_mut(&edge.number) {
            Some((_, limit)) if input.u8() < 220 => {
                *limit = limit.wrapping_add(input.number().wrapping_add(1));
                *limit
            }
            _ => input.number(),
        };
        let came = if input.u8() < 200 { 0 } else { input.number() };
        let (held, edges) = (input.u8().into(), if input.u8() < 200 { 1 } else { input.u8() });
        self.say(&Message::Credit(EdgeCredits { first: edge, limit, came, held, edges }));
    }

    fn need(&mut self, input: &mut Input<'_>) {
        let (edge, step) = (self.own_edge(input), input.number());
        let message = match input.u8() {
            0..=200 => Message::Need { edge, step },
            _ => Message::Unneed { edge, step },
        };
        self.say(&message);
    }

    fn retire(&mut self, input: &mut Input<'_>) {
        let edge = self.own_edge(input);
        if input.u8() > 240 {
            return self.say(&Message::Resumed);
        }
        let came = input.number();
        self.from_node.remove(&edge.number);
        self.say(&Message::Retire { edge, came });
    }

    fn meta(&mut self, input: &mut Input<'_>) {
        let dtype = [DType::U8, DType::F32, DType::Bool, DType::String][input.below(4)];
        let dims: Vec<u64> = (0..input.below(4)).map(|_| input.number()).collect();
        let shape = Shape::new(&dims).unwrap_or(Shape::SCALAR);
        let meta = match dtype.size() {
            Some(_) => TensorMeta::new(dtype, shape),
            None => TensorMeta::serialized(dtype, shape, input.number()),
        };
        let meta = meta.unwrap_or_else(|_| self.tensors[1].meta().clone());
        let placement = [Placement::POOL, Placement::BORROWED][input.below(2)];
        self.say(&Message::Meta(VersionedMeta { version: input.number() as u32, placement, meta }));
    }

    fn tell_metas(&mut self) {
        if std::mem::replace(&mut self.has_told_metas, true) {
            return;
        }
        for (version, meta) in
            (1..).zip(self.tensors.iter().map(|tensor| tensor.meta().clone()).collect::<Vec<_>>())
        {
            self.say(&Message::Meta(VersionedMeta { version, placement: Placement::POOL, meta }));
        }
    }

    /// A record: of an edge and with a count that are right, or of any.
    fn record(&mut self, input: &mut Input<'_>) {
        self.tell_metas();
        let need = if input.u8() > 160 { self.needs.pop() } else { None };
        let known: Vec<_> = self.to_node.iter().map(|(number, (of, _))| (*number, *of)).collect();
        let edge = need.map_or_else(|| edge_of(&known, input), |(edge, _)| edge);
        let step = need.map_or_else(|| input.number(), |(_, step)| step);
        let answers_need = need.is_some() != (input.u8() > 250);
        let n = match self.to_node.get_mut(&edge.number) {
            Some((_, sent)) if input.u8() < 250 => {
                *sent = sent.wrapping_add(1);
                *sent
            }
            _ => input.number() as u16,
        };
        let which = input.below(SIZES.len());
        let meta = if input.u8() < 250 { which as u16 + 1 } else { input.number() as u16 };
        let tensor = self.tensors[which].clone();
        let checksum = match input.u8() {
            0..=200 => None,
            201..=240 => Some(checksum_of(tensor.bytes())),
            _ => Some(input.u64()),
        };
        let value = match input.u8() {
            // A fabric that lends has no long records.
            0..=130 if tensor.bytes().len() < SLOT || input.u8() < 20 => {
                RecordValue::Bytes { meta, data: tensor.bytes() }
            }
            0..=220 => {
                let may_borrow = input.flag();
                let record = LentRecord { edge, n, step, meta, may_borrow, answers_need, checksum };
                return self.lend_tensor(&tensor, record.to_message(), input);
            }
            221..=228 => RecordValue::Dead,
            229..=236 => RecordValue::Offer { meta: input.below(6) as u16, offer: input.u8().into() },
            237..=240 => RecordValue::Written { meta: input.below(6) as u16 },
            _ => RecordValue::Error(status(input)),
        };
        let checksum = checksum.filter(|_| !matches!(value, RecordValue::Dead | RecordValue::Error(_)));
        self.say(&Message::Record { edge, n, step, answers_need, checksum, value });
    }

    fn lend(&mut self, input: &mut Input<'_>) {
        let tensor = self.tensors[input.below(SIZES.len())].clone();
        let len = input.below(SHORT_MESSAGE + 1);
        let words = [(); 6].map(|()| input.u64());
        let message = ShortMessage { len, first: input.u64() as u32, words };
        self.lend_tensor(&tensor, message, input);
    }

    /// Lends a tensor with a message, of which a word may be changed.
    fn lend_tensor(&mut self, tensor: &Tensor, mut message: ShortMessage, input: &mut Input<'_>) {
        let Some(link) = self.link else { return };
        match input.u8() {
            0..=240 => {}
            241..=245 => message.first = input.u64() as u32,
            other => message.words[usize::from(other % 3)] = input.u64(),
        }
        let _ = self.port.lend(link, &mut Some(tensor.clone()), &mut Some(LoanPermit::unbounded()), &message);
    }

    /// What a sender says about edges beside records.
    fn answer(&mut self, input: &mut Input<'_>) {
        let known: Vec<_> = self.to_node.iter().map(|(number, (of, _))| (*number, *of)).collect();
        let edge = edge_of(&known, input);
        let message = match input.u8() {
            0..=60 => Message::Flush { edge },
            61..=100 => Message::Release { edge },
            101..=150 => Message::Retired { edge },
            _ => Message::Refused { edge, status: status(input) },
        };
        self.say(&message);
    }

    fn end(&mut self, input: &mut Input<'_>) {
        let first = input.number();
        let last = if input.flag() { first } else { input.number() };
        let status = if input.flag() { None } else { Some(status(input)) };
        self.say(&Message::StepsOver { first, last, status });
    }

    /// Operations that edge windows have no use for.
    fn disturb(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.link else { return };
        let target = Grant {
            region: input.number() as u16,
            key: input.number() as u32,
            offset: input.number(),
            len: input.number(),
        };
        let immediate = (input.u8() < 200).then(|| immediate(input));
        let tensor = self.tensors[3].clone();
        let len = target.len.min(1000);
        let _ = match input.flag() {
            true => self.port.write(link, &tensor, len, &target, immediate),
            false => self.port.write_inline(link, &[], &target, immediate),
        };
    }

    /// Writes to a destination that the node has granted, whole or not, once or several times.
    fn write_to_grant(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.link else { return };
        let Some((immediate, target)) = pick(&mut self.granted, input) else { return };
        let len = if input.u8() < 230 { target.len } else { input.number() };
        if let Some(tensor) = self.tensors.iter().find(|tensor| tensor.meta().bytes() >= len) {
            let _ = self.port.write(link, &tensor.clone(), len, &target, Some(immediate));
        }
    }

    /// Answers an offer of the node, or one that was not made.
    fn answer_offer(&mut self, input: &mut Input<'_>) {
        let offer = pick(&mut self.offers, input).unwrap_or_else(|| input.u8().into());
        if input.flag() {
            return self.say(&Message::Decline { offer });
        }
        let (immediate, target) = destination(input);
        self.say(&Message::Grant { offer, immediate, target });
    }

    /// Grants a destination for the next tensor of an edge, or wants it back.
    fn make_ready(&mut self, input: &mut Input<'_>) {
        let edge = self.own_edge(input);
        let (immediate, target) = destination(input);
        self.say(&match input.u8() {
            0..=180 => Message::Ready { edge, immediate, target },
            _ => Message::Withdraw { edge },
        });
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
        let Some(link) = self.link else { return count };
        for message in &messages {
            self.consumed = self.consumed.wrapping_add(1);
            self.port.post_receives(link, 1);
            self.hear(message);
        }
        if !messages.is_empty() {
            self.port.publish_credits(link, self.consumed);
        }
        count
    }

    fn hear(&mut self, bytes: &[u8]) {
        if is_packed(bytes) {
            let messages = unpack(bytes).expect("the node's packs are whole");
            return messages.for_each(|message| self.hear(message));
        }
        let mut assembler = std::mem::take(&mut self.assembler);
        let whole = match is_fragment(bytes) {
            true => assembler.push(bytes).expect("the node's fragments are in order"),
            false => Some(bytes).filter(|bytes| !bytes.is_empty()),
        };
        if let Some(whole) = whole {
            self.remember(whole);
        }
        self.assembler = assembler;
    }

    /// Without the answer there is no link: a full queue is tried again.
    fn answer_probe(&mut self, nonce: u64) {
        let Some(link) = self.link else { return };
        let mut pong = Vec::new();
        Message::Pong { nonce }.encode(&mut pong);
        let port = &mut self.port;
        let _ = (0..MAX_TRIES).find(|_| !matches!(port.send(link, &pong), Err(PostError::Full)));
    }

    fn remember(&mut self, bytes: &[u8]) {
        match Message::decode(bytes).expect("the node's messages are whole") {
            Message::Ping { nonce, .. } => self.answer_probe(nonce),
            Message::Record { value: RecordValue::Offer { offer, .. }, .. } => self.offers.push(offer),
            Message::Grant { immediate, target, .. } | Message::Ready { immediate, target, .. } => {
                self.granted.push((immediate, target));
            }
            Message::Announce { edge, .. } => _ = self.to_node.insert(edge.number, (edge.generation, 0)),
            Message::Need { edge, step } => self.needs.push((edge, step)),
            _ => {}
        }
    }
}

/// A destination of the peer that the node may write to.
fn destination(input: &mut Input<'_>) -> (Immediate, Grant) {
    let target = Grant { region: 0, key: input.u8().into(), offset: 0, len: SIZES[input.below(4)] };
    (immediate(input), target)
}

/// One of these, which most often is taken out.
fn pick<T: Copy>(from: &mut Vec<T>, input: &mut Input<'_>) -> Option<T> {
    if from.is_empty() {
        return None;
    }
    let at = input.below(from.len());
    Some(if input.u8() < 230 { from.swap_remove(at) } else { from[at] })
}

/// One of these edges, or one near them.
fn edge_of(known: &[(u32, u16)], input: &mut Input<'_>) -> EdgeId {
    match input.u8() {
        at @ 0..=230 if !known.is_empty() => {
            let (number, generation) = known[usize::from(at) % known.len()];
            EdgeId { number, generation }
        }
        _ => EdgeId { number: input.number() as u32, generation: input.number() as u16 },
    }
}

fn status(input: &mut Input<'_>) -> Status {
    let code = [Code::NotFound, Code::Aborted, Code::Internal][input.below(3)];
    let mut status = Status::new(code, "e".repeat(input.below(250) * 4));
    status.derived = input.flag();
    status
}

fn immediate(input: &mut Input<'_>) -> Immediate {
    match input.u8() {
        0..=200 => Immediate { generation: 0, slot: Slot::ZERO },
        other => Immediate { generation: other, slot: Slot::new(input.u8().into()).expect("20 bits") },
    }
}
