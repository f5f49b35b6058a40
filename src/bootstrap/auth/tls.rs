//! Certificates of members, from files that are read again when they change.
//!
//! A certificate names members by alternative names of the form `tensorwire:JOB/INDEX` (URI). A
//! member believes the authorities of `tls_ca`, which are for one cluster only.

use super::super::blocking;
use super::error::{AuthError, ProofError};
use super::{TlsFiles, Verdict, files, keys};
use crate::wire::TaskId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// Bytes of the longest file.
const MAX_FILE: usize = 1 << 20;
/// Certificates between a member's and an authority's, each of another subject. webpki tries all
/// paths through those that a peer sends, before the peer has proven anything: 600 took 200 s in a
/// test build. Four of one subject have 65 paths.
const MAX_BETWEEN: usize = 4;
/// How often the files are looked at, at most.
const LOOK: Duration = Duration::from_millis(500);

/// This member's certificate and the authorities that it believes.
pub(super) struct Certificates(Arc<WatchedFiles>);

struct WatchedFiles {
    files: TlsFiles,
    me: TaskId,
    present: Mutex<Present>,
}

struct Present {
    loaded: Arc<Loaded>,
    /// The files of `loaded`.
    stamps: FileStamps,
    /// The files that could not be used last, which the log has.
    refused: Option<FileStamps>,
    /// `None` while a thread looks at the files.
    next_look: Option<Instant>,
}

/// What tells that a file was replaced or written: device, inode, size, and the time of its last
/// change. No program can set that time.
type FileStamps = [Option<(u64, u64, u64, i64, i64)>; 3];

struct Loaded {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    server: Arc<ServerConfig>,
}

impl WatchedFiles {
    fn lock(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the files if they have changed since they were read. Files that can't be used leave
    /// the earlier certificates in place, and are tried again with the next look.
    fn look(&self) {
        // Before they are read: a change meanwhile is found later.
        let stamps = stamps(&self.files);
        let has_changed = self.lock().stamps != stamps;
        let read = has_changed.then(|| Loaded::read(&self.files, &self.me));
        let mut present = self.lock();
        present.next_look = Some(Instant::now() + LOOK);
        match read {
            None => present.refused = None,
            Some(Ok(loaded)) => {
                tracing::info!("{}: the certificates are read anew", self.me);
                (present.loaded, present.stamps, present.refused) = (Arc::new(loaded), stamps, None);
            }
            Some(Err(error)) => {
                if present.refused.replace(stamps) != Some(stamps) {
                    tracing::warn!("{}: the earlier certificates stay in use: {error}", self.me);
                }
            }
        }
    }
}

impl Certificates {
    pub(super) fn open(files: &TlsFiles, me: &TaskId) -> Result<Self, AuthError> {
        let stamps = stamps(files);
        let loaded = Arc::new(Loaded::read(files, me)?);
        let next_look = Some(Instant::now() + LOOK);
        let present = Mutex::new(Present { loaded, stamps, refused: None, next_look });
        Ok(Certificates(Arc::new(WatchedFiles { files: files.clone(), me: me.clone(), present })))
    }

    /// The certificates of now. Another thread reads the files, which may take long.
    async fn loaded(&self) -> Arc<Loaded> {
        let is_due = self.0.lock().next_look.take_if(|at| *at <= Instant::now()).is_some();
        if is_due {
            let files = self.0.clone();
            match blocking::start(move || files.look()) {
                // An error is a panic of that thread.
                Ok((_, looked)) => drop(looked.await),
                Err(error) => {
                    let me = &self.0.me;
                    tracing::warn!(
                        "{me}: this process has no thread to look at its certificates, which stay in use: \
                         {error}; raise its limit of processes (ulimit -u)"
                    );
                }
            }
            // The thread has set it, if there was one.
            self.0.lock().next_look.get_or_insert_with(|| Instant::now() + LOOK);
        }
        self.0.lock().loaded.clone()
    }

    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        from: &TaskId,
    ) -> Result<TlsStream<TcpStream>, ProofError> {
        let config = self.loaded().await.server.clone();
        let mut stream = TlsAcceptor::from(config).accept(stream).await?;
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        if chain.first().map(|own| names(own, from)).transpose()?.unwrap_or(false) {
            return Ok(stream.into());
        }
        stream.write_all(&[Verdict::Unproven.to_byte()]).await?;
        stream.flush().await?;
        Err(ProofError::OtherName(from.clone()))
    }

    pub(super) async fn connect(
        &self,
        stream: TcpStream,
        to: &TaskId,
    ) -> Result<TlsStream<TcpStream>, ProofError> {
        let config = self.loaded().await.client(to)?;
        Ok(TlsConnector::from(Arc::new(config)).connect(keys::no_server_name(), stream).await?.into())
    }
}

fn stamps(files: &TlsFiles) -> FileStamps {
    [&files.ca, &files.certificate, &files.key].map(|path| {
        let facts = std::fs::metadata(path).ok()?;
        Some((facts.dev(), facts.ino(), facts.size(), facts.ctime(), facts.ctime_nsec()))
    })
}

impl Loaded {
    fn read(files: &TlsFiles, me: &TaskId) -> Result<Self, AuthError> {
        let provider = keys::provider()?;
        let refused = |key: &'static str, path: &Path| {
            let path = path.to_owned();
            move |why: String| AuthError::File { key, path, why }
        };
        let mut roots = RootCertStore::empty();
        let ca = || refused("tls_ca", &files.ca);
        for authority in certificates(&files.ca).map_err(ca())? {
            roots.add(authority).map_err(|error| ca()(error.to_string()))?;
        }
        let certificate = || refused("tls_certificate", &files.certificate);
        let chain = certificates(&files.certificate).map_err(certificate())?;
        let is_mine = chain.first().map(|own| names(own, me)).transpose();
        if !is_mine.map_err(|error| certificate()(error.to_string()))?.unwrap_or(false) {
            return Err(certificate()(format!("it has no alternative name URI:{}", uri(me))));
        }
        let key = || refused("tls_key", &files.key);
        let text = files::read_private(&files.key, MAX_FILE).map_err(key())?;
        let private = PrivateKeyDer::from_pem_slice(text.bytes())
            .map_err(|_| key()("it has no private key in PEM form".into()))?;
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| ca()(error.to_string()))?;
        let verifier = Arc::new(CallerCertificate(verifier));
        let (own, between) = chain.split_first().expect("a file has a certificate, or is refused");
        // Each role has its own extended key usage.
        let is_server_s = verify(own, between, &roots, UnixTime::now(), &provider);
        let is_client_s = verifier.verify_client_cert(own, between, UnixTime::now());
        is_server_s.and(is_client_s.map(drop)).map_err(|error| certificate()(not_good(&error, &files.ca)))?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| key()(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), private.clone_key())
            .map_err(|error| key()(error.to_string()))?;
        let server = Arc::new(keys::finish_server(server));
        Ok(Loaded { provider, roots, chain, key: private, server })
    }

    fn client(&self, to: &TaskId) -> Result<ClientConfig, Error> {
        let verifier = MemberCertificate {
            roots: self.roots.clone(),
            provider: self.provider.clone(),
            name: to.clone(),
        };
        let config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())?;
        Ok(keys::finish_client(config))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = files::read_public(path, MAX_FILE)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err("it has no certificate in PEM form".into()),
    }
}

/// The alternative name of a member in its certificate.
fn uri(name: &TaskId) -> String {
    format!("tensorwire:{name}")
}

/// Whether a certificate is that member's.
fn names(certificate: &CertificateDer<'_>, name: &TaskId) -> Result<bool, Error> {
    let bad = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
    let certificate = webpki::EndEntityCert::try_from(certificate).map_err(bad)?;
    let wanted = uri(name);
    Ok(certificate.valid_uri_names().any(|found| found == wanted))
}

/// Fails unless an authority of `roots` has signed a certificate for a server, and it holds now.
fn verify(
    certificate: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &RootCertStore,
    now: UnixTime,
    provider: &CryptoProvider,
) -> Result<(), Error> {
    check_others(intermediates)?;
    let parsed = ParsedCertificate::try_from(certificate)?;
    let algorithms = provider.signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, algorithms)
}

/// Refuses certificates through which webpki would look for many paths. With different subjects
/// each of them names one issuer at most, so there is one path.
fn check_others(others: &[CertificateDer<'_>]) -> Result<(), Error> {
    let count = others.len();
    if count > MAX_BETWEEN {
        let what = format!("a certificate comes with {count} others, and {MAX_BETWEEN} are the most");
        return Err(Error::General(what));
    }
    let mut seen: Vec<webpki::EndEntityCert<'_>> = Vec::new();
    for other in others {
        // The same code reads them for a path, so one that it can't read is in none.
        let Ok(other) = webpki::EndEntityCert::try_from(other) else { continue };
        if seen.iter().any(|before| before.subject() == other.subject()) {
            return Err(Error::General("a certificate comes with two others of one subject".into()));
        }
        seen.push(other);
    }
    Ok(())
}

/// Why this member's certificate is none that its peers with the same authorities would believe.
fn not_good(error: &Error, ca: &Path) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            format!("no authority of tls_ca = {} has signed it", ca.display())
        }
        error => format!("its peers would refuse it: {error}"),
    }
}

/// Accepts the certificate of any caller that an authority has signed. The caller's name is
/// compared afterwards.
#[derive(Debug)]
struct CallerCertificate(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for CallerCertificate {
    /// None: a stranger is not told who the authorities are. A member has one certificate to show.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_others(intermediates)?;
        self.0.verify_client_cert(certificate, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        keys::no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Accepts the certificate of one member.
#[derive(Debug)]
struct MemberCertificate {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
    name: TaskId,
}

impl ServerCertVerifier for MemberCertificate {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verify(certificate, intermediates, &self.roots, now, &self.provider)?;
        match names(certificate, &self.name)? {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(Error::InvalidCertificate(CertificateError::NotValidForName)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        keys::no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::tests::certificates::{Authority, write};
    use crate::bootstrap::tests::logged;
    use std::fs::{File, FileTimes};

    /// A member whose certificate has so many between it and the authority.
    fn with_between(count: usize) -> Result<Certificates, AuthError> {
        let (folder, root) = (tempfile::tempdir().unwrap(), Authority::new());
        let mut chain = vec![root.below(0)];
        for number in 1..count {
            chain.push(chain[number - 1].below(number));
        }
        let files = chain.last().unwrap().worker(folder.path(), 0);
        chain.iter().rev().for_each(|authority| authority.add(&files.certificate));
        root.replace(&files.ca);
        Certificates::open(&files, &TaskId::new("worker", 0).unwrap())
    }

    #[test]
    fn four_certificates_may_stand_between_a_member_s_and_the_authority_s() {
        with_between(MAX_BETWEEN).unwrap();
        let error = with_between(MAX_BETWEEN + 1).err().unwrap().to_string();
        assert!(error.contains("comes with 5 others, and 4 are the most"), "{error}");
    }

    /// Six layers, in which each certificate may have signed each of the next one, and others that
    /// webpki looks at on each of 137,256 paths.
    #[test]
    fn many_certificates_are_refused_at_once_on_both_sides() {
        const LAYERS: usize = 6;
        let (folder, root) = (tempfile::tempdir().unwrap(), Authority::new());
        let (mut others, mut upper) = (Vec::new(), root.below(LAYERS));
        for layer in (0..LAYERS).rev() {
            let certificates: Vec<_> = (0..7).map(|_| upper.below(layer)).collect();
            others.extend(certificates.iter().map(Authority::certificate));
            upper = certificates.into_iter().next().unwrap();
        }
        others.resize_with(600, || root.below(LAYERS + 1).certificate());
        let stranger = certificates(&upper.worker(folder.path(), 1).certificate).unwrap().remove(0);
        let (errors, took) = refusals(&stranger, &others);
        for error in errors {
            assert!(error.contains("comes with 600 others"), "{error}");
        }
        assert!(took < Duration::from_millis(100), "{took:?}");
    }

    /// Why a listener and a caller refuse these certificates of a stranger, and the time of both.
    fn refusals(stranger: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> ([String; 2], Duration) {
        let folder = tempfile::tempdir().unwrap();
        let (name, files) = (TaskId::new("worker", 1).unwrap(), Authority::new().worker(folder.path(), 1));
        let loaded = Certificates::open(&files, &name).unwrap().0.lock().loaded.clone();
        let (roots, provider) = (loaded.roots.clone(), loaded.provider.clone());
        let caller = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let caller = CallerCertificate(caller.build().unwrap());
        let listener = MemberCertificate { roots, provider, name };
        let (begin, now, server_name) = (Instant::now(), UnixTime::now(), keys::no_server_name());
        let there = listener.verify_server_cert(stranger, others, &server_name, &[], now).unwrap_err();
        let here = caller.verify_client_cert(stranger, others, now).unwrap_err();
        ([there.to_string(), here.to_string()], begin.elapsed())
    }

    /// Two of them may have signed the stranger's.
    #[test]
    fn certificates_of_one_subject_are_refused_on_both_sides() {
        let (folder, root) = (tempfile::tempdir().unwrap(), Authority::new());
        let (first, second) = (root.below(0), root.below(1));
        let mut others = vec![first.certificate(), second.certificate(), first.below(2).certificate()];
        let stranger = certificates(&second.worker(folder.path(), 1).certificate).unwrap().remove(0);
        for error in refusals(&stranger, &others).0 {
            assert!(!error.contains("one subject"), "{error}");
        }
        others.push(first.below(1).certificate());
        for error in refusals(&stranger, &others).0 {
            assert!(error.contains("comes with two others of one subject"), "{error}");
        }
    }

    #[test]
    fn files_that_were_written_are_read_again_whatever_their_times_say() {
        let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
        let me = TaskId::new("worker", 0).unwrap();
        let files = authority.worker(folder.path(), 0);
        let own = Certificates::open(&files, &me).unwrap();
        let before = std::fs::metadata(&files.certificate).unwrap();
        let good = std::fs::read(&files.certificate).unwrap();
        // The kernel's clock for files has ticks of some milliseconds.
        std::thread::sleep(Duration::from_millis(50));
        // In place, with as many bytes, and with the old times.
        let other: Vec<u8> = good.iter().map(|byte| if *byte == b'A' { b'B' } else { *byte }).collect();
        std::fs::write(&files.certificate, other).unwrap();
        let times = FileTimes::new().set_modified(before.modified().unwrap());
        File::options().write(true).open(&files.certificate).unwrap().set_times(times).unwrap();
        let warnings = |log: &str| log.matches("the earlier certificates stay in use").count();
        let looks = |count: usize| logged(|| (0..count).for_each(|_| own.0.look()));
        assert_eq!(warnings(&looks(3)), 1, "one warning for one change");
        write(&files.certificate, b"half a certif");
        assert_eq!(warnings(&looks(3)), 1, "and one for the next");
        let chain = own.0.lock().loaded.chain.clone();
        // The same content as at the start, and a look that failed does not hide it.
        write(&files.certificate, &good);
        let log = looks(2);
        assert_eq!(log.matches("read anew").count(), 1, "{log}");
        assert_eq!(own.0.lock().loaded.chain, chain);
        assert_eq!(looks(2), "");
    }

    #[test]
    fn a_failure_that_has_nothing_to_do_with_the_files_is_tried_again() {
        let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
        let me = TaskId::new("worker", 0).unwrap();
        let files = authority.worker(folder.path(), 0);
        let own = Certificates::open(&files, &me).unwrap();
        let fresh = authority.worker(folder.path(), 0);
        let stamps = stamps(&fresh);
        // As a look leaves it that could not open these files, for lack of descriptors.
        own.0.lock().refused = Some(stamps);
        let before = own.0.lock().loaded.chain.clone();
        own.0.look();
        assert_ne!(own.0.lock().loaded.chain, before);
        assert_eq!(own.0.lock().stamps, stamps);
    }
}
