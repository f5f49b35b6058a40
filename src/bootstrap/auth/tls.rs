//! Certificates of members, from files that are read again when they change.
//!
//! A certificate names members by alternative names of the form `tensorwire:JOB/INDEX` (URI). A
//! member believes the authorities of `tls_ca`, which are for one cluster only.

use super::error::{AuthError, ProofError};
use super::{TlsFiles, Verdict, files, keys};
use crate::wire::TaskId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// Bytes of the longest file.
const MAX_FILE: usize = 1 << 20;
/// How often the files are looked at, at most.
const LOOK: Duration = Duration::from_millis(500);

/// This member's certificate and the authorities that it believes.
pub(super) struct Certificates {
    files: TlsFiles,
    me: TaskId,
    present: Mutex<Present>,
}

struct Present {
    loaded: Arc<Loaded>,
    stamps: [Option<FileStamp>; 3],
    looked: Instant,
}

/// What tells that a file was replaced or written.
type FileStamp = (u64, u64, i64, i64, u64);

struct Loaded {
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    server: Arc<ServerConfig>,
}

impl Certificates {
    pub(super) fn open(files: &TlsFiles, me: &TaskId) -> Result<Self, AuthError> {
        // Before they are read: a change meanwhile is found later.
        let stamps = stamps(files);
        let loaded = Arc::new(Loaded::read(files, me)?);
        let present = Mutex::new(Present { loaded, stamps, looked: Instant::now() });
        Ok(Certificates { files: files.clone(), me: me.clone(), present })
    }

    /// The certificates of now. Files that can't be used leave the earlier ones in place.
    fn loaded(&self) -> Arc<Loaded> {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        if present.looked.elapsed() >= LOOK {
            present.looked = Instant::now();
            let stamps = stamps(&self.files);
            if stamps != present.stamps {
                present.stamps = stamps;
                match Loaded::read(&self.files, &self.me) {
                    Ok(loaded) => {
                        tracing::info!("{}: the certificates are read anew", self.me);
                        present.loaded = Arc::new(loaded);
                    }
                    Err(error) => {
                        tracing::warn!("{}: the earlier certificates stay in use: {error}", self.me);
                    }
                }
            }
        }
        present.loaded.clone()
    }

    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        from: &TaskId,
    ) -> Result<TlsStream<TcpStream>, ProofError> {
        let config = self.loaded().server.clone();
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
        let config = self.loaded().client(to)?;
        Ok(TlsConnector::from(Arc::new(config)).connect(keys::no_server_name(), stream).await?.into())
    }
}

fn stamps(files: &TlsFiles) -> [Option<FileStamp>; 3] {
    [&files.ca, &files.certificate, &files.key].map(|path| {
        let facts = std::fs::metadata(path).ok()?;
        Some((facts.dev(), facts.ino(), facts.mtime(), facts.mtime_nsec(), facts.size()))
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
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
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
        Err(Error::General("TLS 1.2 is not offered".into()))
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
