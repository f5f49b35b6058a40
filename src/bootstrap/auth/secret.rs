//! The shared secret of a cluster, which never travels. Each member has a key that is derived from
//! the secret and the member's name, and signs the handshake of TLS with it.
//!
//! A caller shows with its opening that it has the secret: by an authentication code, which takes a
//! microsecond to check. The listener prefers such callers, and spends no handshake to find them.
//!
//! Whoever has the secret can be any member. Whoever has not can't tell it from what travels,
//! as long as it can't be guessed; so short secrets are refused.

use super::error::{AuthError, ProofError};
use super::files::{self, Private};
use super::greeting::{MAC, NONCE};
use super::keys;
use crate::wire::TaskId;
use graviola::hashing::Sha256;
use graviola::hashing::hmac::Hmac;
use graviola::signing::eddsa::Ed25519SigningKey;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use rustls::sign::CertifiedKey;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// Bytes of the shortest secret. A file of `tensorwire auth secret` has 64.
const MIN_SECRET: usize = 32;
/// Bytes of the longest secret file.
const MAX_SECRET: usize = 4096;
/// What the keys are for. Another protocol with the same secret has other keys.
const PURPOSE: &[u8] = b"tensorwire bootstrap 1: member ";
/// What the authentication codes are for.
const OPENING: &[u8] = b"tensorwire bootstrap 1: opening ";
/// Room for an Ed25519 key in DER.
const DER: usize = 128;

/// The secret, and this member's key.
pub(super) struct ClusterSecret {
    secret: Private,
    own: Arc<CertifiedKey>,
}

impl ClusterSecret {
    /// Reads the secret of a file that only its owner can read.
    pub(super) fn open(path: &Path, me: &TaskId) -> Result<Self, AuthError> {
        let refused = |why: String| AuthError::File { key: "secret_file", path: path.to_owned(), why };
        let provider = keys::provider()?;
        let secret = files::read_private(path, MAX_SECRET).map_err(refused)?.trimmed();
        let len = secret.bytes().len();
        if len < MIN_SECRET {
            return Err(refused(format!(
                "it has {len} bytes, and {MIN_SECRET} are the least: `tensorwire auth secret FILE` makes one"
            )));
        }
        let key = member_key(&secret, me).map_err(refused)?;
        let mut der = [0; DER];
        let der = key.to_pkcs8_der(&mut der).map_err(|error| refused(format!("{error:?}")))?;
        let signing = provider.key_provider.load_private_key(PrivatePkcs8KeyDer::from(der.to_vec()).into());
        let signing = signing.map_err(|error| refused(error.to_string()))?;
        let public = CertificateDer::from(public_key(&key).map_err(refused)?.to_vec());
        Ok(ClusterSecret { own: Arc::new(CertifiedKey::new(vec![public], signing)), secret })
    }

    /// The public key of a member.
    fn key_of(&self, name: &TaskId) -> Result<SubjectPublicKeyInfoDer<'static>, ProofError> {
        member_key(&self.secret, name).and_then(|key| public_key(&key)).map_err(ProofError::Tls)
    }

    /// The authentication code of the opening with which `from` answers this number of `to`.
    pub(super) fn mac_of(&self, nonce: &[u8; NONCE], from: &TaskId, to: &TaskId) -> [u8; MAC] {
        let mut mac = [0; MAC];
        mac.copy_from_slice(self.hmac_of(nonce, from, to).finish().as_ref());
        mac
    }

    /// Whether a code is that of this opening.
    pub(super) fn verify_mac(
        &self,
        mac: &[u8; MAC],
        nonce: &[u8; NONCE],
        from: &TaskId,
        to: &TaskId,
    ) -> bool {
        self.hmac_of(nonce, from, to).verify(mac).is_ok()
    }

    fn hmac_of(&self, nonce: &[u8; NONCE], from: &TaskId, to: &TaskId) -> Hmac<Sha256> {
        let mut hmac = Hmac::<Sha256>::new(self.secret.bytes());
        hmac.update(OPENING);
        hmac.update(nonce);
        hmac.update(format!("{from} to {to}"));
        hmac
    }

    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        from: &TaskId,
    ) -> Result<TlsStream<TcpStream>, ProofError> {
        let config = keys::server_with_key(self.own.clone(), self.key_of(from)?)?;
        Ok(TlsAcceptor::from(Arc::new(config)).accept(stream).await?.into())
    }

    pub(super) async fn connect(
        &self,
        stream: TcpStream,
        to: &TaskId,
    ) -> Result<TlsStream<TcpStream>, ProofError> {
        let config = keys::client_with_key(self.own.clone(), self.key_of(to)?)?;
        let connected = TlsConnector::from(Arc::new(config)).connect(keys::no_server_name(), stream).await;
        Ok(connected?.into())
    }
}

/// The key of one member: its seed is the HMAC-SHA256 of its name under the secret.
fn member_key(secret: &Private, name: &TaskId) -> Result<Ed25519SigningKey, String> {
    let mut seed = Hmac::<Sha256>::new(secret.bytes());
    seed.update(PURPOSE);
    seed.update(name.to_string());
    Ed25519SigningKey::from_bytes(seed.finish().as_ref()).map_err(|error| format!("{error:?}"))
}

fn public_key(key: &Ed25519SigningKey) -> Result<SubjectPublicKeyInfoDer<'static>, String> {
    let mut der = [0; DER];
    let der = key.public_key().to_spki_der(&mut der).map(<[u8]>::to_vec);
    der.map(SubjectPublicKeyInfoDer::from).map_err(|error| format!("{error:?}"))
}

#[cfg(test)]
impl ClusterSecret {
    /// Shows the public key of one, and signs with the key of the other.
    pub(super) fn forge(&mut self, shown: &Self, signer: &Self) {
        self.own = Arc::new(CertifiedKey::new(shown.own.cert.clone(), signer.own.key.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_code_is_good_for_one_number_and_for_one_name_that_calls_another() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[b's'; 2 * MIN_SECRET]).unwrap();
        let name = |task| TaskId::new("worker", task).unwrap();
        let secret = ClusterSecret::open(file.path(), &name(0)).unwrap();
        let number = [7; NONCE];
        let mac = secret.mac_of(&number, &name(1), &name(0));
        assert!(secret.verify_mac(&mac, &number, &name(1), &name(0)));
        for (number, from, to) in [([8; NONCE], 1, 0), (number, 2, 0), (number, 1, 2), (number, 0, 1)] {
            assert!(!secret.verify_mac(&mac, &number, &name(from), &name(to)), "{from} to {to}");
        }
    }
}
