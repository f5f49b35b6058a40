//! Turns of all operations between two ports that one thread owns.

use crate::driver::Fake;
use crate::harness::{connect, immediate, pool, tensor, tensor_mut};
use tensorwire::internals::fabric::verbs::{VerbsFabric, VerbsOptions, VerbsPort};
use tensorwire::internals::fabric::{Completions, Event, Fabric, LinkId, LinkOptions, Port, PostError};
use tensorwire::internals::wire::Grant;
use tensorwire::{Tensor, TensorMut};

/// Polls within which a turn must end: the fake carries requests out at the post.
const MAX_POLLS: u32 = 100_000;

/// One end, and its arrivals.
struct End {
    port: VerbsPort,
    link: LinkId,
    completions: Completions,
    /// Numbers of completed operations, and of arrived messages and immediates.
    came: [u32; 3],
    /// The target of a read, once it has completed.
    target: Option<TensorMut>,
}

impl End {
    fn poll(&mut self) {
        self.completions.clear();
        self.port.poll(&mut self.completions);
        for (completion, message) in self.completions.drain() {
            match completion.event {
                Event::Done => self.came[0] += 1,
                Event::ReadDone { target, .. } => {
                    self.came[0] += 1;
                    self.target = Some(target);
                }
                Event::Message(_) => {
                    assert_eq!(message, b"a message");
                    self.came[1] += 1;
                }
                Event::Immediate { .. } => self.came[2] += 1,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Two ends, with the tensors and grants of the writes and the read.
pub struct Turns {
    a: End,
    b: End,
    source: Tensor,
    grant: Grant,
    exposed: Grant,
    returned: u32,
    _fabrics: [VerbsFabric; 2],
}

impl Turns {
    pub fn new(fake: &Fake, options: VerbsOptions, bytes: usize) -> Self {
        let pools = [pool(16 << 20), pool(16 << 20)];
        let make =
            |pool| VerbsFabric::with_library(fake.library, pool, options.clone()).expect("it has a device");
        let fabrics = [make(&pools[0]), make(&pools[1])];
        let links = connect(&fabrics[0], &fabrics[1], &LinkOptions { depth: 64, generation: 1, receives: 0 });
        let end = |fabric: &VerbsFabric, link| {
            let mut port = fabric.port().expect("a port");
            let link = port.attach(link).expect("room");
            let completions = Completions::with_capacity(64);
            End { port, link, completions, came: [0; 3], target: None }
        };
        let (mut a, mut b) = (end(&fabrics[0], links.0), end(&fabrics[1], links.1));
        a.target = Some(tensor_mut(&pools[0], bytes));
        let grant = b.port.grant(b.link, tensor_mut(&pools[1], bytes)).expect("room");
        let exposed = b.port.expose(b.link, &tensor(&pools[1], &vec![2; bytes])).expect("room");
        let source = tensor(&pools[0], &vec![1; bytes]);
        Turns { a, b, source, grant, exposed, returned: 0, _fabrics: fabrics }
    }

    /// Posts a write, a write with immediate, an inline write, a message and a read, and the
    /// receives for them.
    pub fn turn(&mut self) {
        let Turns { a, b, source, grant, exposed, .. } = self;
        let len = source.bytes().len() as u64;
        b.port.post_receives(b.link, 3);
        self.returned += 3;
        b.port.publish_credits(b.link, self.returned);
        a.port.write(a.link, source, len, grant, None).expect("room");
        a.port.write(a.link, source, len, grant, Some(immediate(7))).expect("room");
        a.port.write_inline(a.link, b"inline", grant, Some(immediate(8))).expect("room");
        a.port.send(a.link, b"a message").expect("room");
        let target = a.target.take().expect("it came back");
        let posted: Result<(), (PostError, TensorMut)> = a.port.read(a.link, target, exposed);
        posted.expect("room");
        for _ in 0..MAX_POLLS {
            a.poll();
            b.poll();
            if a.came == [3, 0, 0] && b.came == [0, 1, 2] && a.port.peer_credits(a.link) == self.returned {
                (a.came, b.came) = ([0; 3], [0; 3]);
                return;
            }
        }
        panic!("this is all that came: {:?} {:?}", a.came, b.came);
    }

    /// Arms both ports, as before a sleep.
    pub fn arm(&mut self) {
        for end in [&mut self.a, &mut self.b] {
            while !end.port.arm() {
                end.poll();
            }
        }
    }
}
