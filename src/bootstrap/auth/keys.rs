//! TLS 1.3 in which each side proves that it has one expected key. RFC 7250 has such keys instead
//! of certificates. Here is also what all uses of TLS have in common.

use super::error::AuthError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use std::sync::{Arc, LazyLock};

/// The algorithms, in one instance for all connections.
static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(rustls_graviola::default_provider()));

/// The cryptography that TLS uses here.
pub(super) fn provider() -> Result<Arc<CryptoProvider>, AuthError> {
    if !graviola::util::is_cpu_supported() {
        return Err(AuthError::Cpu);
    }
    Ok(PROVIDER.clone())
}

/// A name for TLS. It is neither sent nor compared: the verifiers have the names of members.
pub(super) fn no_server_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([127, 0, 0, 1]).into())
}

/// No session is resumed, so that each connection proves all anew.
pub(super) fn finish_server(mut config: ServerConfig) -> ServerConfig {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config
}

/// The same for the side that calls.
pub(super) fn finish_client(mut config: ClientConfig) -> ClientConfig {
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config
}

/// The side that listens, for a caller with this key.
pub(super) fn server_with_key(
    own: Arc<CertifiedKey>,
    expected: SubjectPublicKeyInfoDer<'static>,
) -> Result<ServerConfig, Error> {
    let config = ServerConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(ExpectedKey(expected)))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
    Ok(finish_server(config))
}

/// The side that calls a listener with this key.
pub(super) fn client_with_key(
    own: Arc<CertifiedKey>,
    expected: SubjectPublicKeyInfoDer<'static>,
) -> Result<ClientConfig, Error> {
    let config = ClientConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ExpectedKey(expected)))
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
    Ok(finish_client(config))
}

/// Accepts one key, whose owner signs the handshake.
#[derive(Debug)]
struct ExpectedKey(SubjectPublicKeyInfoDer<'static>);

impl ExpectedKey {
    fn check(&self, presented: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Result<(), Error> {
        if others.is_empty() && presented.as_ref() == self.0.as_ref() {
            return Ok(());
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }
}

/// TLS 1.2 is not offered.
pub(super) fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("TLS 1.2 is not offered".into()))
}

/// The methods that both verifiers have.
macro_rules! signatures_of_the_key {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _presented: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            no_tls12()
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            presented: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let key = SubjectPublicKeyInfoDer::from(presented.as_ref());
            let algorithms = &PROVIDER.signature_verification_algorithms;
            verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for ExpectedKey {
    fn verify_server_cert(
        &self,
        presented: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(presented, others).map(|()| ServerCertVerified::assertion())
    }

    signatures_of_the_key!();
}

impl ClientCertVerifier for ExpectedKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        presented: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(presented, others).map(|()| ClientCertVerified::assertion())
    }

    signatures_of_the_key!();
}
