//! Proofs for a connection beside the service: `tensorwire perf` has one between its two processes.

use super::auth::{AuthSettings, AuthStream, Authenticator, ProofError};
use super::pacer::HandshakePacer;
use super::{BootstrapError, thread};
use crate::wire::{TaskId, is_lack};
use rustix::net::SendFlags;
use std::future::poll_fn;
use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, copy, split};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long the end of a channel waits for the last bytes to leave.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// Proves this process's name to others, and has them prove theirs, as members of a cluster do. It
/// may be used by several threads at a time.
///
/// Only errors of the system have a number: what this process lacks, whoever is at the other end.
#[derive(Clone)]
pub struct Prover(Arc<Proving>);

struct Proving {
    auth: Authenticator,
    /// Delays callers after failed proofs.
    pacer: HandshakePacer,
    me: TaskId,
    runtime: Runtime,
}

impl Prover {
    /// A prover for this name.
    ///
    /// # Errors
    /// [`BootstrapError::Auth`] if a file can't be used, [`BootstrapError::Start`] if the system
    /// lacks something.
    pub fn open(settings: &AuthSettings, me: &TaskId) -> Result<Self, BootstrapError> {
        let auth =
            Authenticator::open(settings, me).map_err(|why| BootstrapError::Auth { me: me.clone(), why })?;
        let (pacer, runtime) = (HandshakePacer::default(), thread::runtime()?);
        Ok(Prover(Arc::new(Proving { auth, pacer, me: me.clone(), runtime })))
    }

    /// A first look at a caller, which takes no time where the kernel has sock_diag. One that is
    /// refused is told so.
    ///
    /// # Errors
    /// Why it is refused, in words about it.
    pub fn screen(&self, stream: &TcpStream) -> io::Result<()> {
        let known = self.tokio(stream.try_clone()?)?;
        self.0.auth.screen(&known).map_err(|(verdict, why)| {
            let error = failed(why);
            // With a lack of this process, the caller is not refused and may try again.
            if !is_lack(&error) {
                let greeting = self.0.auth.refusal(verdict);
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                // It is lost if the caller has gone.
                let _ = rustix::net::send(stream, greeting.as_ref(), flags);
            }
            error
        })
    }

    /// Has a caller prove that it is `from`, within `limit`. Callers that prove nothing delay later
    /// ones.
    ///
    /// # Errors
    /// Why it has not, in words about it.
    pub fn accept(&self, stream: TcpStream, from: &TaskId, limit: Duration) -> io::Result<ProvenChannel> {
        let stream = self.tokio(stream)?;
        let Proving { auth, pacer, .. } = &*self.0;
        let proof = async {
            let greeted = auth.greet(stream).await?;
            pacer.run(greeted.has_secret, auth.admit(greeted)).await
        };
        let admitted = self.within(limit, proof)?;
        if admitted.name != *from {
            let why = format!("it is {}, and this process waits for {from}", admitted.name);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        self.channel(admitted.stream)
    }

    /// Proves this process's name to the listener at the other end, which must be `to`, within
    /// `limit`.
    ///
    /// # Errors
    /// What is not proven, in words about the listener.
    pub fn connect(&self, stream: TcpStream, to: &TaskId, limit: Duration) -> io::Result<ProvenChannel> {
        let stream = self.tokio(stream)?;
        let proven = self.within(limit, self.0.auth.connect(stream, to))?;
        self.channel(proven)
    }

    fn tokio(&self, stream: TcpStream) -> io::Result<tokio::net::TcpStream> {
        let _context = self.0.runtime.enter();
        stream.set_nonblocking(true)?;
        tokio::net::TcpStream::from_std(stream)
    }

    fn within<T>(
        &self,
        limit: Duration,
        proof: impl Future<Output = Result<T, ProofError>>,
    ) -> io::Result<T> {
        let proof = async { timeout(limit, proof).await.unwrap_or(Err(ProofError::TooLate)) };
        self.0.runtime.block_on(proof).map_err(failed)
    }

    /// Starts the thread that carries the bytes.
    fn channel(&self, stream: AuthStream) -> io::Result<ProvenChannel> {
        let (ours, inner) = UnixStream::pair()?;
        inner.set_nonblocking(true)?;
        let (closes, closing) = oneshot::channel();
        let this = self.clone();
        let carrier = std::thread::Builder::new().name("tw-carrier".into()).spawn(move || {
            this.0.runtime.block_on(async {
                if let Ok(inner) = tokio::net::UnixStream::from_std(inner) {
                    carry(inner, stream, closing).await;
                }
            });
        })?;
        Ok(ProvenChannel { stream: ours, carrier: Some((closes, carrier)) })
    }
}

impl std::fmt::Debug for Prover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prover").field("me", &self.0.me).finish_non_exhaustive()
    }
}

/// Carries bytes both ways until the program closes its end. The end of the other side closes that
/// direction. `closing` comes when the program has closed its end.
async fn carry(program: tokio::net::UnixStream, peer: AuthStream, closing: oneshot::Receiver<()>) {
    let ((mut from_program, mut to_program), (mut from_peer, mut to_peer)) = (split(program), split(peer));
    // A failure ends a direction, as the end of its source does.
    let mut outward = pin!(async {
        drop(copy(&mut from_program, &mut to_peer).await);
        drop(to_peer.shutdown().await);
    });
    // A peer that reads nothing takes no last bytes.
    let mut too_late = pin!(async {
        let _ = closing.await;
        tokio::time::sleep(LAST_BYTES).await;
    });
    let mut inward = pin!(async {
        drop(copy(&mut from_peer, &mut to_program).await);
        drop(to_program.shutdown().await);
    });
    let mut has_ended = false;
    poll_fn(|context| {
        has_ended = has_ended || inward.as_mut().poll(context).is_ready();
        match outward.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => too_late.as_mut().poll(context),
        }
    })
    .await;
}

fn failed(error: ProofError) -> io::Error {
    let kind = match error {
        ProofError::Io(error) | ProofError::Unknown(error) if is_lack(&error) => return error,
        ProofError::Io(ref error) | ProofError::Cut(ref error) => error.kind(),
        _ => io::ErrorKind::PermissionDenied,
    };
    io::Error::new(kind, error.to_string())
}

/// A connection whose two ends have proven their names. What is written to its stream is protected
/// as the mode says. Its drop waits until the last bytes have left.
#[derive(Debug)]
pub struct ProvenChannel {
    stream: UnixStream,
    /// The thread that carries the bytes, and the word that this end is closed.
    carrier: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl ProvenChannel {
    /// The stream to the other side.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

impl Drop for ProvenChannel {
    fn drop(&mut self) {
        // Fails if it is closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        if let Some((closes, carrier)) = self.carrier.take() {
            // The thread may have ended with the connection.
            let _ = closes.send(());
            // It can't panic, and the last bytes have a time limit.
            let _ = carrier.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(10);

    fn name(task: u32) -> TaskId {
        TaskId::new("perf", task).expect("a job name")
    }

    fn secret(text: &str) -> (tempfile::NamedTempFile, AuthSettings) {
        let mut file = tempfile::NamedTempFile::new().expect("a private file");
        file.write_all(text.repeat(8).as_bytes()).expect("written");
        let settings = AuthSettings::Secret(file.path().to_owned());
        (file, settings)
    }

    /// What both sides get: task 0 calls, and says that it is `me`.
    fn prove(settings: [&AuthSettings; 2], me: u32) -> [io::Result<ProvenChannel>; 2] {
        prove_to(&Prover::open(settings[1], &name(1)).expect("good"), settings[0], me)
    }

    fn prove_to(listens: &Prover, theirs: &AuthSettings, me: u32) -> [io::Result<ProvenChannel>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let caller = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (accepted, _) = listener.accept().expect("a caller");
        let calls = Prover::open(theirs, &name(me)).expect("good");
        let calling = std::thread::spawn(move || calls.connect(caller, &name(1), SOON));
        let accepted = listens.screen(&accepted).and_then(|()| listens.accept(accepted, &name(0), SOON));
        [calling.join().expect("no panic"), accepted]
    }

    #[test]
    fn bytes_go_both_ways_and_the_last_ones_arrive() {
        let (_file, secret) = secret("0123456789");
        for settings in [&AuthSettings::Uid, &AuthSettings::Plain, &secret] {
            let [Ok(caller), Ok(listener)] = prove([settings; 2], 0) else { panic!("{settings:?}") };
            let long = vec![7; 1 << 20];
            let mut got = Vec::new();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    caller.stream().write_all(&long).expect("written");
                    drop(caller);
                });
                listener.stream().read_to_end(&mut got).expect("read");
            });
            assert_eq!(got.len(), long.len(), "{settings:?}");
            assert!(got == long, "{settings:?}");
        }
    }

    #[test]
    fn a_peer_that_reads_nothing_does_not_hold_up_the_end() {
        let [Ok(caller), Ok(listener)] = prove([&AuthSettings::Plain; 2], 0) else { panic!("plain") };
        let stuck = Duration::from_millis(200);
        listener.stream().set_write_timeout(Some(stuck)).expect("it is valid");
        while listener.stream().write(&[0; 1 << 16]).is_ok() {}
        let begin = Instant::now();
        drop(listener);
        assert!((LAST_BYTES..5 * LAST_BYTES).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(caller);
    }

    #[test]
    fn a_caller_of_this_host_that_has_gone_is_not_taken_for_one_of_another() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        drop(TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens"));
        let (mut accepted, _) = listener.accept().expect("a caller");
        assert_eq!(accepted.read(&mut [0]).expect("its end"), 0);
        let prover = Prover::open(&AuthSettings::Uid, &name(1)).expect("good");
        let why = prover.screen(&accepted).expect_err("nobody's").to_string();
        assert!(why.contains("has ended the connection") && !why.contains("secret_file"), "{why}");
    }

    #[test]
    fn a_lack_of_this_process_is_the_error_of_the_system_and_a_failed_proof_is_not() {
        for lack in [ProofError::Io, ProofError::Unknown].map(|of| of(Errno::MFILE.into())) {
            assert_eq!(Errno::from_io_error(&failed(lack)), Some(Errno::MFILE));
        }
        let gone = failed(ProofError::Io(Errno::CONNRESET.into()));
        assert_eq!((gone.kind(), gone.raw_os_error()), (io::ErrorKind::ConnectionReset, None));
    }

    #[test]
    fn a_caller_without_a_proof_delays_the_next_one() {
        let (_one, first) = secret("0123456789");
        let (_two, second) = secret("abcdefghij");
        for (theirs, is_delayed) in [(&second, true), (&first, false)] {
            let listens = Prover::open(&first, &name(1)).expect("good");
            let [_, accepted] = prove_to(&listens, theirs, 0);
            assert_eq!(accepted.is_err(), is_delayed, "{accepted:?}");
            assert_eq!(listens.0.pacer.delayed_until(false).is_some(), is_delayed);
        }
    }

    #[test]
    fn another_secret_another_mode_and_another_name_are_refused() {
        let (_one, first) = secret("0123456789");
        let (_two, second) = secret("abcdefghij");
        for (settings, me) in [([&first, &second], 0), ([&AuthSettings::Uid, &first], 0)] {
            let [caller, listener] = prove(settings, me);
            println!("{caller:?}, {listener:?}");
            assert!(caller.is_err() && listener.is_err());
        }
        let [_, listener] = prove([&first, &first], 7);
        let why = listener.expect_err("not perf/0").to_string();
        assert!(why.contains("it is perf/7") && why.contains("waits for perf/0"), "{why}");
    }
}
