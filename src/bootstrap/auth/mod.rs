//! How members prove who they are, before a connection carries a request.
//!
//! The side that listens greets; the side that calls opens with its name; then both prove theirs
//! in the way of the [`AuthMode`]. A last byte says that the caller is admitted. HTTP/2 begins
//! after it, so no request of a stranger is read. All is bounded in bytes and in time.
//!
//! | file | content |
//! |---|---|
//! | `greeting` | the frames |
//! | `uid` | the user of a connection, from the kernel |
//! | `secret` | the shared secret, and the keys that follow from it |
//! | `tls` | certificates of members |
//! | `keys` | TLS between two known keys |
//! | `files` | files that only their owner can read |
//! | `stream` | the connection after the proof |
//! | `error` | errors and refusals |

mod error;
mod files;
mod greeting;
mod keys;
mod secret;
mod stream;
mod tls;
mod uid;

pub use error::AuthError;
pub(super) use error::ProofError;
pub(super) use greeting::Verdict;
pub(super) use stream::AuthStream;

use crate::wire::TaskId;
use greeting::{Greeting, MAC, NONCE, Opening};
use secret::ClusterSecret;
use std::fmt;
use std::io;
use std::path::PathBuf;
use tls::Certificates;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uid::{SocketOwner, SocketOwners};

/// How members prove who they are.
///
/// ```
/// use tensorwire::{AuthMode, Config};
/// let settings = Config::builder().without_environment().member("worker", 0);
/// let config = settings.set("cluster", "worker=127.0.0.1:7000,127.0.0.1:7001").build()?;
/// assert_eq!(config.auth_mode(), AuthMode::Uid);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AuthMode {
    /// `tls`: each member has a certificate with its name.
    Tls,
    /// `secret`: all members have the same secret.
    Secret,
    /// `uid`: all members run on this host as one user, and the kernel says whose a connection is.
    Uid,
    /// `plain`: nothing is proven. Whoever reaches the port can be any member.
    Plain,
}

impl AuthMode {
    const ALL: [AuthMode; 4] = [AuthMode::Tls, AuthMode::Secret, AuthMode::Uid, AuthMode::Plain];

    /// The name of the mode in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            AuthMode::Tls => "tls",
            AuthMode::Secret => "secret",
            AuthMode::Uid => "uid",
            AuthMode::Plain => "plain",
        }
    }

    fn to_byte(self) -> u8 {
        match self {
            AuthMode::Tls => 1,
            AuthMode::Secret => 2,
            AuthMode::Uid => 3,
            AuthMode::Plain => 4,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.to_byte() == byte)
    }
}

impl fmt::Display for AuthMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The mode with what it needs.
///
/// ```
/// use tensorwire::{AuthMode, AuthSettings, TlsFiles};
/// let files = TlsFiles::new("ca.pem", "worker-0.pem", "worker-0.key");
/// assert_eq!(AuthSettings::Tls(files).mode(), AuthMode::Tls);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AuthSettings {
    /// [`AuthMode::Tls`].
    Tls(TlsFiles),
    /// [`AuthMode::Secret`], with the file of the secret.
    Secret(PathBuf),
    /// [`AuthMode::Uid`].
    Uid,
    /// [`AuthMode::Plain`].
    Plain,
}

impl AuthSettings {
    /// Without the files.
    pub fn mode(&self) -> AuthMode {
        match self {
            AuthSettings::Tls(_) => AuthMode::Tls,
            AuthSettings::Secret(_) => AuthMode::Secret,
            AuthSettings::Uid => AuthMode::Uid,
            AuthSettings::Plain => AuthMode::Plain,
        }
    }
}

/// The files of [`AuthMode::Tls`], in PEM form. [`AuthSettings`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsFiles {
    /// The authorities that sign the members' certificates.
    pub ca: PathBuf,
    /// This member's certificate, and those between it and an authority: at most four.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

impl TlsFiles {
    /// These three files. Nothing is read yet.
    pub fn new(ca: impl Into<PathBuf>, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        TlsFiles { ca: ca.into(), certificate: certificate.into(), key: key.into() }
    }
}

/// Proves this process's name to others, and has them prove theirs.
pub(super) struct Authenticator {
    me: TaskId,
    method: Method,
}

enum Method {
    Tls(Box<Certificates>),
    Secret(ClusterSecret),
    Uid(SocketOwners),
    Plain,
}

/// A caller that has sent its opening, and has proven nothing.
pub(super) struct Greeted {
    stream: TcpStream,
    from: TaskId,
    /// It has the secret of the cluster.
    pub(super) has_secret: bool,
}

/// A proven caller.
pub(super) struct Admitted {
    pub(super) stream: AuthStream,
    pub(super) name: TaskId,
}

impl Authenticator {
    /// Reads what the mode needs.
    pub(super) fn open(settings: &AuthSettings, me: &TaskId) -> Result<Self, AuthError> {
        let method = match settings {
            AuthSettings::Tls(files) => Method::Tls(Box::new(Certificates::open(files, me)?)),
            AuthSettings::Secret(file) => Method::Secret(ClusterSecret::open(file, me)?),
            AuthSettings::Uid => Method::Uid(SocketOwners::open()?),
            AuthSettings::Plain => Method::Plain,
        };
        Ok(Authenticator { me: me.clone(), method })
    }

    fn mode(&self) -> AuthMode {
        match self.method {
            Method::Tls(_) => AuthMode::Tls,
            Method::Secret(_) => AuthMode::Secret,
            Method::Uid(_) => AuthMode::Uid,
            Method::Plain => AuthMode::Plain,
        }
    }

    /// Whether [`screen`](Self::screen) takes time.
    pub(super) fn screens_slowly(&self) -> bool {
        matches!(&self.method, Method::Uid(owners) if owners.is_slow())
    }

    /// The first look at a new connection. It takes no time, except on kernels without sock_diag.
    pub(super) fn screen(&self, stream: &TcpStream) -> Result<(), (Verdict, ProofError)> {
        match &self.method {
            Method::Uid(owners) => this_user(owners, stream).map_err(|error| {
                let verdict = match error {
                    ProofError::OtherUser { .. } => Verdict::OtherUser,
                    ProofError::OtherHost => Verdict::OtherHost,
                    _ => Verdict::Unproven,
                };
                (verdict, error)
            }),
            Method::Tls(_) | Method::Secret(_) | Method::Plain => Ok(()),
        }
    }

    /// The greeting that refuses.
    pub(super) fn refusal(&self, verdict: Verdict) -> impl AsRef<[u8]> {
        Greeting { mode: self.mode(), verdict, nonce: [0; NONCE] }.encode()
    }

    /// Greets a caller and has it prove its name.
    #[cfg(test)]
    pub(super) async fn accept(&self, stream: TcpStream) -> Result<Admitted, ProofError> {
        self.admit(self.greet(stream).await?).await
    }

    /// Greets a caller and reads its opening. The caller of this function bounds its time, and that
    /// of [`admit`](Self::admit).
    pub(super) async fn greet(&self, stream: TcpStream) -> Result<Greeted, ProofError> {
        self.opened(stream).await.map_err(|error| error.with_remedy(self.mode()))
    }

    /// Has a greeted caller prove its name.
    pub(super) async fn admit(&self, greeted: Greeted) -> Result<Admitted, ProofError> {
        self.proven(greeted).await.map_err(|error| error.with_remedy(self.mode()))
    }

    async fn opened(&self, mut stream: TcpStream) -> Result<Greeted, ProofError> {
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce).map_err(|error| ProofError::Io(io::Error::other(error.to_string())))?;
        let greeting = Greeting { mode: self.mode(), verdict: Verdict::Welcome, nonce };
        stream.write_all(&greeting.encode()).await?;
        let opening = opening(&mut stream).await?;
        // What was sent before the kernel was asked does not count.
        if opening.nonce != nonce {
            return Err(ProofError::NoOpening);
        }
        let Opening { mac, from, .. } = opening;
        let has_secret = match &self.method {
            Method::Secret(own) => own.verify_mac(&mac, &nonce, &from, &self.me),
            Method::Tls(_) | Method::Uid(_) | Method::Plain => false,
        };
        Ok(Greeted { stream, from, has_secret })
    }

    async fn proven(&self, Greeted { stream, from, .. }: Greeted) -> Result<Admitted, ProofError> {
        let mut stream = match &self.method {
            Method::Tls(own) => AuthStream::Tls(Box::new(own.accept(stream, &from).await?)),
            Method::Secret(own) => AuthStream::Tls(Box::new(own.accept(stream, &from).await?)),
            Method::Uid(_) | Method::Plain => AuthStream::Tcp(stream),
        };
        stream.write_all(&[Verdict::Welcome.to_byte()]).await?;
        stream.flush().await?;
        Ok(Admitted { stream, name: from })
    }

    /// Proves this process's name to member `to`, and has it prove its own.
    pub(super) async fn connect(&self, stream: TcpStream, to: &TaskId) -> Result<AuthStream, ProofError> {
        self.prove(stream, to).await.map_err(|error| match error {
            ProofError::Io(error) if was_cut(&error) => ProofError::Cut(error),
            error => error.with_remedy(self.mode()),
        })
    }

    async fn prove(&self, mut stream: TcpStream, to: &TaskId) -> Result<AuthStream, ProofError> {
        let mut bytes = [0; Greeting::LEN];
        stream.read_exact(&mut bytes).await?;
        let greeting = Greeting::decode(&bytes).ok_or(ProofError::NoGreeting)?;
        let (ours, theirs) = (self.mode(), greeting.mode);
        if ours != theirs {
            return Err(ProofError::OtherMode { ours, theirs });
        }
        if let Method::Uid(owners) = &self.method {
            // It has greeted, so it has accepted the connection, and the socket is its own. One
            // that has refused may have closed it since, and then the kernel finds nobody.
            let checked = this_user(owners, &stream);
            let has_closed = |error: &ProofError| {
                greeting.verdict != Verdict::Welcome
                    && matches!(error, ProofError::OtherHost | ProofError::Ended)
            };
            if let Err(error) = checked
                && !has_closed(&error)
            {
                return Err(error);
            }
        }
        if greeting.verdict != Verdict::Welcome {
            return Err(ProofError::refused(greeting.verdict, ours));
        }
        let mac = match &self.method {
            Method::Secret(own) => own.mac_of(&greeting.nonce, &self.me, to),
            Method::Tls(_) | Method::Uid(_) | Method::Plain => [0; MAC],
        };
        let opening = Opening { nonce: greeting.nonce, mac, from: self.me.clone() };
        stream.write_all(&opening.encode()).await?;
        let mut stream = match &self.method {
            Method::Tls(own) => AuthStream::Tls(Box::new(own.connect(stream, to).await?)),
            Method::Secret(own) => AuthStream::Tls(Box::new(own.connect(stream, to).await?)),
            Method::Uid(_) | Method::Plain => AuthStream::Tcp(stream),
        };
        match Verdict::from_byte(stream.read_u8().await?) {
            Verdict::Welcome => Ok(stream),
            refused => Err(ProofError::refused(refused, ours)),
        }
    }
}

/// Whether the other side has ended the connection.
pub(super) fn was_cut(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Fails unless the other end of the connection is this user's socket on this host.
fn this_user(owners: &SocketOwners, stream: &TcpStream) -> Result<(), ProofError> {
    let (peer, local) = (stream.peer_addr()?, stream.local_addr()?);
    match owners.owner(peer, local).map_err(ProofError::Unknown)? {
        SocketOwner::ThisUser => Ok(()),
        SocketOwner::OtherUser(uid) => Err(ProofError::OtherUser { uid }),
        // The other end is on this host: it has closed its socket.
        SocketOwner::Nobody if peer.ip().to_canonical().is_loopback() => Err(ProofError::Ended),
        SocketOwner::Nobody => Err(ProofError::OtherHost),
    }
}

async fn opening(stream: &mut TcpStream) -> Result<Opening, ProofError> {
    let len = usize::from(stream.read_u8().await?);
    if len > Opening::MAX {
        return Err(ProofError::NoOpening);
    }
    let mut bytes = [0; Opening::MAX];
    stream.read_exact(&mut bytes[..len]).await?;
    Opening::decode(&bytes[..len]).ok_or(ProofError::NoOpening)
}

#[cfg(test)]
impl Authenticator {
    /// Proves users as on a kernel without sock_diag.
    pub(super) fn without_sock_diag(me: &TaskId) -> Self {
        Authenticator { me: me.clone(), method: Method::Uid(SocketOwners::by_tables()) }
    }

    /// Calls as another member than the one whose proof it has.
    pub(super) fn call_oneself(&mut self, name: TaskId) {
        self.me = name;
    }

    /// Shows the public key of one with a secret, and signs with the key of another one. It still
    /// knows the keys of the members, so it finds that the listener is the one that it calls.
    pub(super) fn forge(&mut self, shown: &Self, signer: &Self) {
        let (Method::Secret(own), Method::Secret(shown), Method::Secret(signer)) =
            (&mut self.method, &shown.method, &signer.method)
        else {
            panic!("only secrets have such keys");
        };
        own.forge(shown, signer);
    }
}
